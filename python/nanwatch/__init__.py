"""nanwatch: the flight recorder for numerics in PyTorch.

A module call goes from `instrumentation` (wrappers before the calls) to `recording` (tensors to frames, a ring of the
latest), at a failure to `session` (what to do about it), `diagnosis` (the batch again: operation, line, cures) and
`report` (text, JSON, HTML). docs/architecture.md has the rooms and the way through them.

`watch(model)` starts all of it; `abs_range(x)` and `tensor_health(x)` are the reduction alone. Beside it stand
`exponent_histogram(x)`, the elements by power of two, and `would_fit(x, dtype)`, what a format
would make of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ._version import __version__
from .capsule.capsule import Capsule, write_capsule
from .integrations.debug import DebugUnderflowOverflow, detect_overflow
from .integrations.debug_option import follow_environment, patch_transformers, unpatch_transformers
from .numerics import _extension as _extension
from .numerics.exponents import ExponentHistogram, exponent_histogram
from .numerics.fit import Fit, narrowest, would_fit
from .numerics.ranges import AbsRange, TensorHealth, abs_range, abs_ranges, tensor_health
from .precision.precision import fp32_modules, run_in_fp32
from .report.errors import BatchLimitError, CapsuleError, NonFiniteError, TraceError
from .report.finding import Cure, Finding
from .report.frame import Frame
from .report.record import Record
from .report.report import Report
from .session.api import Watch, watch
from .session.replay import replay

if TYPE_CHECKING:
    from .trace.comparison import diff
    from .trace.difference import Difference
    from .trace.trace_file import Trace
else:
    # What reads traces is for after a run, and is imported when it is asked for.
    _LATER = {"Difference": "trace.difference", "Trace": "trace.trace_file", "diff": "trace.comparison"}

    def __getattr__(name: str) -> object:
        if name not in _LATER:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found = getattr(import_module(f".{_LATER[name]}", __name__), name)
        return found


__all__ = [
    "AbsRange",
    "BatchLimitError",
    "Capsule",
    "CapsuleError",
    "Cure",
    "DebugUnderflowOverflow",
    "Difference",
    "ExponentHistogram",
    "Finding",
    "Fit",
    "Frame",
    "NonFiniteError",
    "Record",
    "Report",
    "TensorHealth",
    "Trace",
    "TraceError",
    "Watch",
    "__version__",
    "abs_range",
    "abs_ranges",
    "detect_overflow",
    "diff",
    "exponent_histogram",
    "fp32_modules",
    "narrowest",
    "patch_transformers",
    "replay",
    "run_in_fp32",
    "tensor_health",
    "unpatch_transformers",
    "watch",
    "would_fit",
    "write_capsule",
]

follow_environment()
