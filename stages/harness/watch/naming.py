"""What the user's own code is called: the framework that trains, and the name that a module has in it."""

import inspect
import re
import sys
import traceback

from torch import nn

from .modules import FABRIC, modules_of
from .threads import is_of_a_library, lies_in_a_library

FRAMEWORKS = ("transformers", "lightning", "pytorch_lightning", "accelerate", "skorch")


def framework_of(frame):
    """Return the outermost package of FRAMEWORKS, or "fabric", that called the optimizer in whose step a frame is.

    None without one.
    """
    framework = None
    for caller, _ in traceback.walk_stack(frame):
        module = caller.f_globals.get("__name__", "")
        package = module.split(".")[0]
        if module.startswith(FABRIC):
            framework = "fabric"
        elif package in FRAMEWORKS:
            framework = package.removeprefix("pytorch_")
    return framework


def name_in_script(module, frame):
    """Return the name under which the user's own code holds a module, "net" or "self.policy"; "" without one.

    frame: the innermost one.
    """
    owners = owners_on_stack(frame)
    for name, owner in owners:
        if owner is module:
            return name
    for name, owner in owners:
        parts = modules_of(owner) if isinstance(owner, nn.Module) else {}
        if module in parts:
            return name + re.sub(r"\.(\d+)(?=\.|$)", r"[\1]", parts[module])  # "net.layers[0]", as one types it
        for part_name, part in list(getattr(owner, "__dict__", {}).items()):
            if part is module:
                return f"{name}.{part_name}"
    return ""


def owners_on_stack(frame):
    """Return [(name, object)] of all that the user's own code holds, that of the innermost frame first.

    The names that a library has for it can't be typed in the user's code. But "self" can, if it is of a class of the
    user's, as in Lightning.
    """
    owners = []
    for caller, _ in traceback.walk_stack(frame):
        if is_of_a_library(caller):
            owner = caller.f_locals.get("self")
            if isinstance(owner, nn.Module) and is_class_of_user(type(owner)):
                owners.append(("self", owner))
        else:
            owners += [*caller.f_locals.items(), *caller.f_globals.items()]
        if caller.f_code.co_flags & inspect.CO_OPTIMIZED and sys.version_info < (3, 13):
            caller.f_locals.clear()  # of a function it is a copy, which would hold what the script deletes
    return owners


def is_class_of_user(owner_class):
    """Return whether a class is in the user's own code. One of a module that has no file is not."""
    module = sys.modules.get(owner_class.__module__)
    path = getattr(module, "__file__", None)
    return path is not None and not lies_in_a_library(vars(module), path)
