"""Code of the program: which files are its own, and what a frame holds."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

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


@functools.lru_cache(4096)
def names_of(code: CodeType) -> frozenset[str]:
    """Return the globals and attributes that this code and the functions defined inside it mention."""
    inner = (names_of(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


def frame_values(frame: FrameType) -> dict[str, Any]:
    """Return the names of a frame with their values, and leave no copy of them with the frame."""
    values = frame.f_locals
    copy = dict(values)
    is_copy = frame.f_code.co_flags & CO_OPTIMIZED and type(values) is dict
    if is_copy and sys.getrefcount(values) == _OF_FRAME:
        values.clear()
    return copy


_LIBRARIES = (f"{os.path.dirname(os.__file__)}{os.sep}", *SKIPPED_FILES, "<frozen ")
_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")


@functools.lru_cache(1024)
def is_library(filename: str) -> bool:
    """Return whether the file belongs to Python, torch or an installed package, not to the program."""
    return filename.startswith(_LIBRARIES) or _INSTALLED.search(filename) is not None
