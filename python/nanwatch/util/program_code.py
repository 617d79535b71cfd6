"""Code of the program: which files are its own, which names its functions mention and assign, what a frame holds."""

from __future__ import annotations

import contextlib
import functools
import os
import site
import sys
import sysconfig
from dis import opmap
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch

# With the separator: torchvision is not torch.
SKIPPED_FILES = (
    f"{Path(torch.__file__).parent}{os.sep}",
    f"{Path(__file__).parents[1]}{os.sep}",
    contextlib.__file__,
    functools.__file__,
)

# References to a frame's copy of its locals where nobody else has it. Before Python 3.13 `f_locals` returns that copy.
_OF_FRAME = 3
_STORES = {opmap["STORE_ATTR"]: "attributes", opmap["DELETE_ATTR"]: "attributes"}
# At the top level of a module STORE_NAME assigns a global.
_GLOBAL_STORES = {opmap[name] for name in ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_NAME", "DELETE_NAME")}


class Names(NamedTuple):
    """Names in a function's bytecode: all that it mentions, the attributes it assigns, the globals it assigns."""

    mentioned: frozenset[str]
    attributes: frozenset[str]
    globals: frozenset[str]


@functools.lru_cache(4096)
def names_of(code: CodeType) -> Names:
    """Return the names in this code and in the functions defined inside it."""
    mentioned, attributes, stored = set(code.co_names), set(), set()
    bytecode = code.co_code
    operations = set(bytecode[::2])
    if not operations.isdisjoint(_STORES) or not operations.isdisjoint(_GLOBAL_STORES):
        extended = 0
        for operation, argument in zip(bytecode[::2], bytecode[1::2], strict=True):
            argument |= extended
            extended = argument << 8 if operation == opmap["EXTENDED_ARG"] else 0
            if operation in _STORES:
                attributes.add(code.co_names[argument])
            elif operation in _GLOBAL_STORES:
                stored.add(code.co_names[argument])
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            below = names_of(inner)
            mentioned |= below.mentioned
            attributes |= below.attributes
            stored |= below.globals
    return Names(frozenset(mentioned), frozenset(attributes), frozenset(stored))


def frame_values(frame: FrameType) -> dict[str, Any]:
    """Return the names of a frame with their values, and leave no copy of them with the frame."""
    values = frame.f_locals
    found = dict(values)
    is_copy = frame.f_code.co_flags & CO_OPTIMIZED and type(values) is dict
    if is_copy and sys.getrefcount(values) == _OF_FRAME:
        values.clear()
    return found


def _library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {
        paths["stdlib"],
        paths["platstdlib"],
        paths["purelib"],
        paths["platlib"],
        *site.getsitepackages(),
    }
    found.add(os.path.dirname(os.__file__))
    return tuple(f"{one}{os.sep}" for one in found)


_LIBRARIES = (*_library_folders(), *SKIPPED_FILES, "<frozen ")


@functools.lru_cache(1024)
def is_library(filename: str) -> bool:
    """Return whether the file belongs to Python, torch or an installed package, not to the program."""
    return filename.startswith(_LIBRARIES) or f"{os.sep}site-packages{os.sep}" in filename
