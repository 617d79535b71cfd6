"""Names of modules in the user's own model, where wrappers such as DistributedDataParallel hold parts of it.

A wrapper holds one module under one key, adds nothing that a user has named, and passes its arguments on. Its key is no
part of a name: `module.encoder._checkpoint_wrapped_module.fc` is `encoder.fc`. The wrapper itself is named by its class
in brackets, `(DistributedDataParallel)` or `encoder.(CheckpointWrapper)`, so that no two modules share a name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from torch import nn

from ..util.messages import without_wrappers
from ..util.program import each_module

# Classes by name, because most are in parts of packages that only their users import. A module of the user's own with a
# child called `module` is none of these.
_PACKAGES = ("torch", "lightning", "lightning_fabric", "deepspeed")
_INNER_KEYS = {
    **dict.fromkeys(
        ("DistributedDataParallel", "DataParallel", "AveragedModel", "DeepSpeedEngine"), "module"
    ),
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "ActivationWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
    "_FabricModule": "_forward_module",
}


class Named(NamedTuple):
    """Module, its name in the user's model, and its path for get_submodule() of the watched module."""

    name: str
    path: str
    module: nn.Module


def inner_key(module: nn.Module) -> str | None:
    """Return the key under which a wrapper holds its module, or None for a module that is no wrapper."""
    for kind in type(module).__mro__:
        key = _INNER_KEYS.get(kind.__name__)
        if key and module._modules.get(key) is not None and kind.__module__.split(".")[0] in _PACKAGES:
            return key
    return None


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module inside the wrappers, or the module itself if it is no wrapper."""
    while (key := inner_key(module)) is not None:
        module = module._modules[key]  # type: ignore[assignment]
    return module


def original_module(model: nn.Module) -> nn.Module:
    """Return the module inside `torch.compile(module)`, or any other module itself."""
    return model.get_submodule(key) if (key := inner_key(model)) == "_orig_mod" else model


def is_recorded(module: nn.Module) -> bool:
    """Return whether the calls of a module are frames.

    Calls of a wrapper only mark batches, because the module in it gets the same arguments. But DataParallel over
    several devices calls copies of that module, which are not watched.
    """
    return inner_key(module) is None or len(getattr(module, "device_ids", None) or ()) > 1


def named_modules(model: nn.Module, name: str = "", *, remove_duplicate: bool = True) -> Iterator[Named]:
    """Yield each module of the tree in the order of nn.Module.named_modules, with the same `remove_duplicate`.

    `name` is the name of `model`, or of the module in it.
    """
    places: dict[str, tuple[str, str | None]] = {}
    modules = each_module(model) if remove_duplicate else model.named_modules(remove_duplicate=False)
    for path, module in modules:
        place = name
        if path:
            above, _, key = path.rpartition(".")
            base, wrappers_key = places.get(above, (above, None))
            place = base if key == wrappers_key else _joined(base, key)
        key_inside = inner_key(module)
        places[path] = place, key_inside
        name_here = place if key_inside is None else _joined(place, f"({type(module).__name__})")
        yield Named(name_here, path, module)


def child_name(parent: nn.Module, name: str, key: str) -> str:
    """Return the name of the child `key` of `parent`, whose name is `name`, or of the module inside that child."""
    wrappers_key = inner_key(parent)
    if wrappers_key is not None and name.endswith(")"):  # otherwise it held nothing yet when it was named
        name = name.rpartition("(")[0].removesuffix(".")
    return name if key == wrappers_key else _joined(name, key)


def module_names(model: nn.Module) -> dict[nn.Module, str]:
    """Return the first name of each module."""
    return {named.module: named.name for named in named_modules(model)}


def find_module(model: nn.Module, name: str) -> Named | None:
    """Return the module of this name or path, or None. A module in several places has several of both."""
    by_name = {named.name: named for named in named_modules(model)}
    if name in by_name:
        return by_name[name]
    places = named_modules(model, remove_duplicate=False)
    module = next((named.module for named in places if name in (named.name, named.path)), None)
    return next((named for named in by_name.values() if named.module is module), None)


def for_names(pattern: str, names: Iterable[str]) -> str:
    """Return the pattern, without wrappers' keys if it matches one of these names only so."""
    names, plain = list(names), without_wrappers(pattern)
    matching = (x for x in (pattern, plain) if any(fnmatchcase(name, x) for name in names))
    return next(matching, pattern)


def parameter_owners(model: nn.Module) -> dict[int, tuple[Named, str]]:
    """Return the first module that has each parameter, and its name in it, by the parameter's id."""
    owners: dict[int, tuple[Named, str]] = {}
    for owner in named_modules(model):
        for key, x in list(owner.module._parameters.items()):
            if x is not None:
                owners.setdefault(id(x), (owner, key))
    return owners


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Return the name of each parameter by its id."""
    return {number: _joined(owner.name, key) for number, (owner, key) in parameter_owners(model).items()}


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
