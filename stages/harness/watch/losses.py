"""What a script calls backward() on: its losses, and by what each was scaled."""

import torch

from . import pytorch
from .timeline import is_captured


def losses_of(tensors):
    """Return [(value, share)] of what backward() gets, a tensor or several. share: see share_of()."""
    losses = []
    if is_captured():
        return losses
    if not isinstance(tensors, (list, tuple)):
        tensors = [tensors]
    for tensor in tensors:
        if torch.is_tensor(tensor) and tensor.numel() == 1 and not tensor.is_complex():
            # on a card a copy, which does not wait for it, and into which no CUDA graph writes
            value = tensor.item() if tensor.is_cpu else tensor.detach().float().clone()
            losses.append((value, share_of(tensor.grad_fn)))
    return losses


def share_of(node):
    """Return (factor, operation) of a loss that was scaled by a number last, as accumulation does, else None.

    factor: 0.25 for `loss / 4`, or None if it lies on a card. operation: the name of what made the loss before it was
    scaled. node: the grad_fn of the scaled loss.
    """
    if node is None or node.name() not in ("DivBackward0", "MulBackward0"):
        return None
    saved = [pytorch.saved_by(node, "other"), pytorch.saved_by(node, "self")]
    constants = [tensor for tensor in saved if tensor is not None and not tensor.requires_grad]
    operations = [each.name() for each, _ in node.next_functions if each]
    if len(constants) != 1 or len(operations) != 1:  # the product of two losses
        return None
    factor = constants[0].item() if constants[0].is_cpu else None
    if factor and node.name() == "DivBackward0":
        factor = 1 / factor
    return factor, operations[0]
