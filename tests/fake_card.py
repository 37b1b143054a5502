"""Runs the text of a stage on an NVIDIA card that is not there, for compile_for_gpus.py and memory_of_stages.py.

The tensors are those of torch's FakeTensorMode, which have a shape, a dtype and a device, and neither memory nor
numbers. A CPU build of torch lacks what autograd and autocast ask of CUDA, so fake_card.cpp answers for it:
this module compiles that file with g++ and loads it. Import it before torch, which asks only once whether
there is a card.
"""

import ctypes
import importlib.util
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

TESTS = Path(__file__).resolve().parent
sys.path[:0] = [str(TESTS.parent / "stages"), str(TESTS.parent)]
sys.dont_write_bytecode = True


def load_backend():
    """Compile fake_card.cpp against this Python's torch, in about six seconds, and load it into this process."""
    if "torch" in sys.modules:
        raise RuntimeError("fake_card must be imported before torch")
    torch_folder = Path(importlib.util.find_spec("torch").origin).parent
    libraries = torch_folder / "lib"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "fake_card.so")
        command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{torch_folder / 'include'}"]
        command += [str(TESTS / "fake_card.cpp"), "-o", str(library)]
        command += [f"-L{libraries}", f"-Wl,-rpath,{libraries}", "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True)
        ctypes.CDLL(str(library))


load_backend()

import harness
from harness import ladder

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim.optimizer import _foreach_supported_types

import data
from model import GPT

CARD = torch.device("cuda", 0)
# the attention kernels between which PyTorch chooses by the card
FLASH, EFFICIENT = "flash", "efficient"


class FakeLoader:
    """Takes the place of TokenLoader: batches of fake ids, (B, T) each."""

    def __init__(self, tokens, batch_size, seq_len, rank=0, world_size=1):
        self.shape = (batch_size, seq_len)

    def next_batch(self):
        return torch.zeros(self.shape, dtype=torch.int64), torch.zeros(self.shape, dtype=torch.int64)


def settings(batch_size, amp_dtype, compiled, steps=1, size="gpt2", seq_len=1024, accum=4):
    """What parse_args returns to a stage on the card, as far as the stages read it."""
    return SimpleNamespace(
        device=CARD,
        seed=1337,
        data=None,
        size=size,
        batch_size=batch_size,
        seq_len=seq_len,
        accum=accum,
        steps=steps,
        amp_dtype=amp_dtype,
        compile=compiled,
    )


def pretend(attention_kernel=FLASH):
    """Let torch in this process take the card as there, as far as a stage's step needs it.

    attention_kernel: what F.scaled_dot_product_attention runs. PyTorch chooses it by the card: FLASH from
    compute capability 8.0 on, EFFICIENT before. (On Hopper and Blackwell it may choose cuDNN's.)
    """
    torch.cuda.amp.common.amp_definitely_not_available = lambda: False  # else autocast turns itself off
    torch.cuda.is_bf16_supported = lambda including_emulation=True: True
    # a card's parameters are plain tensors, which AdamW updates all at once by its foreach kernels
    _foreach_supported_types.append(FakeTensor)
    GPT.to_empty = put_on_card
    GPT.to = lambda self, device: self  # it is there already
    kernel = flash_attention if attention_kernel == FLASH else efficient_attention
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", kernel, "AutogradCUDA")
    pretend.library = library  # what is registered goes with it


def put_on_card(model, device):
    """Give every module of a GPT, whose weights are on no device yet, fake weights on the card."""
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            module.register_parameter(name, torch.nn.Parameter(torch.empty(weight.shape, device=CARD)))
    return model


def flash_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """What PyTorch's composite scaled_dot_product_attention calls where it chooses the flash kernel."""
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]


def efficient_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
    """The same where it chooses the memory-efficient kernel."""
    kernel = torch.ops.aten._scaled_dot_product_efficient_attention
    return kernel(q, k, v, attn_mask, q.requires_grad, dropout_p, is_causal, scale=scale)[0]


def run_stage(name, args, log, loader=FakeLoader):
    """Run stages/NAME.py on fake tensors of the card, with log and loader in place of StepLog and TokenLoader.

    args: of settings(). Returns what the stage bound at its end, a dict.
    """
    harness.parse_args = lambda docstring: args
    harness.StepLog = log
    data.TokenLoader = loader
    data.load_tokens = lambda source: None
    with FakeTensorMode(allow_non_fake_inputs=True):  # get_lr's and AdamW's scalars are no fakes
        return runpy.run_path(str(ladder.FOLDER / f"{name}.py"))
