"""The fallback: which parts run in Python with NANWATCH_EXT=0, and what it refuses, as docs/installing.md lists it."""

from __future__ import annotations

import os
from pathlib import Path
from types import FunctionType

import torch
from torch import nn

import nanwatch
from nanwatch.instrumentation import slot
from nanwatch.numerics import _extension
from support import watching
from support.processes import environment, forked

_MAPS = Path("/proc/self/maps")


def compiled_parts() -> dict[str, bool]:
    """Return for each part whether it is the compiled one, by what is in force and not by what was chosen."""
    model = nn.Linear(2, 2)
    watch = watching.watch(model)
    model(torch.ones(1, 2))
    nanwatch.abs_range(torch.ones(2))
    assert watch.counters["frames"] == 1
    wrapper = type(slot._slot.find(id(model)))
    watch.stop()
    return {
        "kernels": torch._C._dispatch_has_kernel_for_dispatch_key("nanwatch::abs_range", "CPU"),
        "functions": not isinstance(nanwatch.abs_range, FunctionType),
        "slot": type(slot._slot).__mro__[1].__module__ == "nanwatch._C",
        "wrapper": wrapper.__mro__[1].__module__ == "nanwatch._C",
        "recorder": type(watch._recorder).__module__ == "nanwatch._C",
        "library": "/nanwatch/_C" in _MAPS.read_text() if _MAPS.exists() else _extension.C is not None,
    }


def test_all_parts_are_compiled_or_none_is() -> None:
    """In this process, in which `make test-pure` runs its tests, as in a fresh one with NANWATCH_EXT=0."""
    is_compiled = _extension.C is not None
    assert not (is_compiled and os.environ.get("NANWATCH_EXT") == "0")
    assert compiled_parts() == dict.fromkeys(compiled_parts(), is_compiled)
    program = "from integration.test_fallback import compiled_parts as parts; raise SystemExit(any(parts().values()))"
    silent = "-W", "error::RuntimeWarning"  # as it was asked for
    done = forked(*silent, "-c", program, env=environment(NANWATCH_EXT="0"), imported=False)
    assert done.returncode == 0, done.stderr
