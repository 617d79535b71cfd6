"""Loads the compiled part once, and remembers why not.

`C` is the module `nanwatch._C` or None, and `reason` says in words why it is None. Loading it registers the kernels
with PyTorch's dispatcher and nothing more: no CUDA call is made. A library that was built without a compiler
works all the same, so the loss is explained where it is felt, by `explain_once()` at the first use of the fallback.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

import torch

_T = TypeVar("_T")

REBUILD = "pip install --no-build-isolation --force-reinstall --no-deps -v ."


def _read_build() -> dict[str, str]:
    try:
        facts = json.loads(Path(__file__).parents[1].joinpath("_build.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {str(key): str(value) for key, value in facts.items()} if isinstance(facts, dict) else {}


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def _switched_off() -> bool:
    value = os.environ.get("NANWATCH_EXT", "")
    if value not in ("", "0", "1"):
        raise ValueError(
            f"NANWATCH_EXT={value!r} is not understood; use 0 (run without the compiled part) or 1, or unset it"
        )
    return value == "0"


def _load() -> tuple[ModuleType | None, str]:
    if _switched_off():
        return None, "switched off by NANWATCH_EXT=0"
    built, running = build.get("torch", ""), str(torch.__version__)
    mismatch = f"it was built against torch {built} and this is torch {running}; rebuild it: {REBUILD}"
    # torch keeps no binary interface between minor versions: a module that loads all the same may read garbage.
    if "failure" not in build and built and _minor(built) != _minor(running):
        return None, mismatch
    try:
        return importlib.import_module("nanwatch._C"), ""
    except ModuleNotFoundError as error:
        if error.name != "nanwatch._C":
            return None, f"it could not be loaded: {error}"
        if "failure" in build:
            return None, f"it was not built: {build['failure']}"
        return None, f"it is not installed for this Python; build it: {REBUILD}"
    except ImportError as error:
        if built and built != running:
            return None, f"it could not be loaded ({error}): {mismatch}"
        return None, f"it could not be loaded: {error}; rebuild it: {REBUILD}"


build: dict[str, str] = _read_build()
"""What the build wrote down: python, torch, compiler, cuda, cuda_archs, cuda_reason, failure (each only if known)."""

C, reason = _load()

if C is not None and (_warning := str(C.cpu_capability_warning())):
    warnings.warn(_warning, RuntimeWarning, stacklevel=2)

_explained = C is not None or reason.startswith("switched off")  # who switched it off needs no explanation


def explain_once() -> None:
    """Warn at the first use of the fallback that the compiled part is missing, why, and how to get it.

    Silent when the compiled part is there, when NANWATCH_EXT=0 asked for its absence, and from the second call on.
    """
    global _explained
    if _explained:
        return
    _explained = True
    warnings.warn(
        f"nanwatch runs without its compiled part: every answer is the same, each takes 10 to 100 times longer. "
        f"Reason: {reason}. `python -m nanwatch` says more; NANWATCH_EXT=0 silences this.",
        RuntimeWarning,
        stacklevel=3,
    )


def instances_of(kind: type[_T]) -> list[_T]:
    """Return all objects of a class, or of one derived from it, that the garbage collector knows: 50 ms for a million.

    With the compiled part no other thread runs meanwhile. A thread that is just building a tuple would find that
    somebody else has it, and fail.
    """
    if C is not None:
        return cast("list[_T]", C.instances_of(kind))
    # Not isinstance: an object may be asked for its class, and answer by importing half a library.
    found: list[Any] = [one for one in gc.get_objects() if issubclass(type(one), kind)]
    return found
