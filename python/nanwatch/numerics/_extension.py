"""The compiled part, loaded once, and the operators `torch.ops.nanwatch.*`, which are there with and without it.

`C` is the module `nanwatch._C` or None, and `reason` says in words why it is None. Loading it registers the kernels
with PyTorch's dispatcher and nothing more: no CUDA call is made. A library that was built without a compiler
works all the same, so the loss is explained where it is felt, by `explain_once()` at the first use of the fallback.

An install from source has one module, for the PyTorch it was built against. A wheel has one for each of several
minor versions of PyTorch.

The operators exist as soon as this module is imported: `_reference` serves every device and layout, and a native kernel
registered for a device takes its place there. The dispatcher chooses, no `if` does. Nothing else calls an operator. A
row is a measurement, not a function to differentiate: the autograd keys fall through, so no graph is built.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.machinery
import importlib.util
import json
import os
import platform
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from .._version import __version__
from . import _reference

_T = TypeVar("_T")

REBUILD = "`pip install --no-build-isolation --force-reinstall --no-deps -v .`"
_OFF = "switched off by NANWATCH_EXT=0"
_PACKAGE = Path(__file__).parents[1]


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _file_for(version: str) -> Path | None:
    """Return the module that fits this version of PyTorch: the wheel's for its minor version, or the only one."""
    names = (f"_C-torch{_minor(version)}", "_C")
    paths = [
        _PACKAGE / (name + suffix) for name in names for suffix in importlib.machinery.EXTENSION_SUFFIXES
    ]
    return next((path for path in paths if path.exists()), None)


def _is_stale() -> bool:
    """Return whether the build has declarations that differ from those of now, such as the fields of a record."""
    try:
        stub = _PACKAGE.joinpath("_C.pyi").read_bytes()
    except OSError:  # left out of an installation: then nobody has edited it
        return False
    return build.get("stub", digest := hashlib.sha256(stub).hexdigest()) != digest


def _load() -> tuple[ModuleType | None, str]:
    if (value := os.environ.get("NANWATCH_EXT", "")) not in ("", "0", "1"):
        raise ValueError(
            f"NANWATCH_EXT={value!r} is not understood; use 0 (run without the compiled part) or 1, or unset it"
        )
    if value == "0":
        return None, _OFF
    if "failure" in build:
        return None, f"it was not built: {build['failure']}"
    built, running = build.get("torch", "").split(), str(torch.__version__)
    mismatch = (
        f"it was built against torch {', '.join(built)} and this is torch {running}; "
        f"in the source tree this builds it: {REBUILD}"
    )
    # torch keeps no binary interface between minor versions: a module that loads all the same may read garbage.
    if built and _minor(running) not in map(_minor, built):
        return None, mismatch
    if (path := _file_for(running)) is None:
        return None, f"it is not installed for this Python; build it: {REBUILD}"
    if _is_stale():
        older = "it is older than the Python sources, whose records or calls are others by now"
        return None, f"{older}; rebuild it: {REBUILD}"
    spec = importlib.util.spec_from_file_location("nanwatch._C", path)
    assert spec is not None
    assert spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        advice = mismatch if built and running not in built else f"rebuild it: {REBUILD}"
        return None, f"it could not be loaded ({error}): {advice}"
    sys.modules["nanwatch._C"] = module
    return module, ""


build: dict[str, str] = {}
"""Facts that the build wrote: python, stub, torch, compiler, cuda, cuda_archs, cuda_reason, failure (each if known)."""

with suppress(OSError, ValueError):
    build |= json.loads(_PACKAGE.joinpath("_build.json").read_text(encoding="utf-8"))

C, reason = _load()

if C is not None and (_warning := str(C.cpu_capability_warning())):
    warnings.warn(_warning, RuntimeWarning, stacklevel=2)


@cache
def explain_once() -> None:
    """Warn at the first use of the fallback that the compiled part is missing, why, and how to get it.

    Silent when the compiled part is there, when NANWATCH_EXT=0 asked for its absence, and from the second call on.
    """
    if C is not None or reason == _OFF:  # who switched it off needs no explanation
        return
    warnings.warn(
        f"nanwatch runs without its compiled part: every answer is the same, each takes 10 to 100 times longer. "
        f"Reason: {reason}. `python -m nanwatch` says more; NANWATCH_EXT=0 silences this.",
        RuntimeWarning,
        stacklevel=3,
    )


def versions() -> dict[str, str | None]:
    """Return the versions that a result depends on."""
    return {
        "nanwatch": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
    }


def instances_of(kind: type[_T]) -> list[_T]:
    """Return all objects of a class, or of one derived from it, that the garbage collector knows: 50 ms for a million.

    With the compiled part no other thread runs meanwhile. A thread that is just building a tuple would find that
    somebody else has it, and fail.
    """
    if C is not None:
        return cast("list[_T]", C.instances_of(kind))
    # Not isinstance: an object may be asked for its class, and answer by importing half a library.
    return [candidate for candidate in gc.get_objects() if issubclass(type(candidate), kind)]


# The operators: each schema, its fallback, its fake.

_library = torch.library.Library("nanwatch", "DEF")


def define(
    schema: str, fallback: Callable[..., Any], fake: Callable[..., Any], *keys: str
) -> Callable[..., Any]:
    """Register one operator and return its overload: resolving `torch.ops.nanwatch.name` costs as much again.

    `keys` are further dispatch keys that the fallback serves.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.register_fake(f"nanwatch::{name}", fake, lib=_library)
    # Nested tensors have dispatch keys of their own, which no alias key covers.
    for key in ("CompositeExplicitAutograd", "NestedTensorCPU", "NestedTensorCUDA", *keys):
        _library.impl(name, fallback, key)
    _library.impl(name, torch.library.fallthrough_kernel, "Autograd")
    overload: Callable[..., Any] = getattr(torch.ops.nanwatch, name).default
    return overload


def _fake_row(x: Tensor, width: int = _reference.RANGE_WIDTH) -> Tensor:
    return torch.empty(width, dtype=_reference.row_dtype(x.device), device=x.device)


def _fake_rows(xs: Sequence[Tensor], width: int = _reference.RANGE_WIDTH) -> Tensor:
    rows = [_fake_row(x, width) for x in xs]
    return torch.stack(rows) if rows else torch.empty((0, width), dtype=torch.float64)


_VIEWS = "Conjugate", "Negative"  # the dispatcher would copy them, at their logical size

abs_range = define("abs_range(Tensor x) -> Tensor", _reference.abs_range, _fake_row, *_VIEWS)
abs_ranges = define("abs_ranges(Tensor[] xs) -> Tensor", _reference.abs_ranges, _fake_rows, *_VIEWS)
health = define(
    "health(Tensor x) -> Tensor", _reference.health, lambda x: _fake_row(x, _reference.HEALTH_WIDTH), *_VIEWS
)
healths = define(
    "healths(Tensor[] xs) -> Tensor",
    _reference.healths,
    lambda xs: _fake_rows(xs, _reference.HEALTH_WIDTH),
    *_VIEWS,
)
