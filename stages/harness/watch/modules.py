"""What a model is made of: its modules and their parameters, also if its class has methods of these names."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from . import pytorch

FABRIC = ("lightning.fabric", "lightning_fabric")  # Lightning's package for loops of one's own


def modules_of(module):
    """Return {a module, and each one in it: its path there, as ".layers.0"}, the outermost first."""
    names = {module: ""}
    parents = [module]
    for parent in parents:  # which grows
        for name, part in nn.Module.named_children(parent):
            if part not in names:
                names[part] = f"{names[parent]}.{name}"
                parents.append(part)
    return names


def parameters_in(modules):
    """Return the parameters that these modules hold themselves, a list. Keras' own method would make new ones."""
    return [p for module in modules for _, p in nn.Module.named_parameters(module, recurse=False)]


def parameters_of(models=(), optimizers=()):
    """Return the parameters of all models and of optimizers, each once.

    Those of an optimizer are all that is known if a compiled function calls the model.
    """
    parameters = []
    for model in models:
        parameters += parameters_in(modules_of(model))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters += group["params"]
    # those that wait for a first batch to have a shape, or for weights to be loaded, are not there yet
    return [p for p in dict.fromkeys(parameters) if not (is_lazy(p) or p.is_meta)]


def size_of(model):
    """Return how many parameters a model has."""
    return sum(p.numel() for p in parameters_of([model]))


def matrix_weights(model):
    """Return how many weights the matrices of a model have. An embedding counts if it is also the last matrix."""
    others = [module for module in modules_of(model) if not isinstance(module, nn.Embedding)]
    matrices = {p for p in parameters_in(others) if p.dim() == 2}
    return sum(p.numel() for p in matrices)


def vocabulary_of(modules):
    """Return the rows of the largest embedding if a layer has as many outputs, or None."""
    rows = max((module.num_embeddings for module in modules if isinstance(module, nn.Embedding)), default=None)
    widths = [module.out_features for module in modules if isinstance(module, nn.Linear)]
    return rows if rows in widths else None


def unwrapped(model):
    """Return the module inside of torch.compile, DistributedDataParallel and Fabric, in whatever order these are."""
    for part in modules_of(model):  # the outermost first
        is_of_fabric = type(part).__module__.startswith(FABRIC)
        if not (is_of_fabric or isinstance(part, DistributedDataParallel) or pytorch.is_around_module(part)):
            return part
