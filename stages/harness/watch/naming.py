"""What the user's own code is called: the framework that trains, and the name that a module has in it."""

import inspect
import re
import sys
import traceback

from torch import nn

from .modules import FABRIC, modules_of
from .threads import is_of_a_library, lies_in_a_library

A_PLACE = re.compile(r"\.(\d+)(?=\.|$)")  # ".0" of "net.layers.0", which one types as [0]
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
        parts = modules_of(owner) if is_module(owner) else {}
        if module in parts:
            return name + A_PLACE.sub(r"[\1]", parts[module])
        for part_name, part in attributes_of(owner).items():
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
            owner = locals_of(caller).get("self")
            if is_module(owner) and is_class_of_user(type(owner)):
                owners.append(("self", owner))
        else:
            owners += [*locals_of(caller).items(), *caller.f_globals.items()]
    return owners


def locals_of(frame):
    """Return {name: object} of what a frame holds.

    Before Python 3.13 a function has one dict for it, which would hold what the script deletes, so it is emptied. If a
    function calls locals(), that dict is the script's, and is left alone.
    """
    is_of_function = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if not is_of_function or sys.version_info >= (3, 13):
        return frame.f_locals
    if "locals" in frame.f_code.co_names:
        return {}
    names = dict(frame.f_locals)
    frame.f_locals.clear()
    return names


def attributes_of(owner):
    """Return {name: object} of what an object holds. A lazy one may raise whatever is asked of it."""
    try:
        return dict(owner.__dict__)
    except Exception:  # also without a __dict__
        return {}


def is_module(owner):
    """Return whether an object is a module. isinstance() would ask for its __class__, and a lazy one may raise."""
    return issubclass(type(owner), nn.Module)


def is_class_of_user(owner_class):
    """Return whether a class is in the user's own code. One of a module that has no file is not."""
    module = sys.modules.get(owner_class.__module__)
    path = getattr(module, "__file__", None)
    return path is not None and not lies_in_a_library(vars(module), path)
