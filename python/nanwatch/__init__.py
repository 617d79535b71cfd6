"""nanwatch: the flight recorder for numerics in PyTorch.

The flow, one file a step (python/nanwatch/):

    module call    calls.py     what stands between a module and its call while it is watched
    -> walk        walk.py      the tensors in its weights, buffers, inputs and outputs, and their labels
    -> range       ranges.py    abs_min, abs_max, isfinite of each, in one pass over memory (csrc/range.h)
    -> record      record.py    one tensor: label, shape, dtype, range
    -> frame       frame.py     one call: its records
    -> recorder    recorder.py  the latest frames, bounded
    -> watch       watching.py  what is met at a fault, at a batch's end, before an optimizer's step
    -> response    response.py  what is done about it: the other ranks told, the user called, an error raised
    -> finding     finding.py   the first non-finite record, and whether its module made or received it
    -> report      report.py    frames and finding, as text, JSON and HTML (text.py, html.py)
    -> postmortem  postmortem.py the failed batch once more: the operation, the line, the cures that work
    -> capsule     capsule.py   a module call with all it needs, to `replay` elsewhere (replay.py)
    -> trace       tracer.py    every frame of a run as rows of a file (trace.py, trace_writer.py)
    -> difference  comparison.py where two such files part (trace_file.py reads them, align.py aligns them)
    -> log         log.py       headroom, ranges and forecasts in the user's own tracker (outlook.py, sink.py)

`watch(model)` starts all of it; `abs_range(x)` and `tensor_health(x)` are the reduction alone. Beside it stand
`exponent_histogram(x)` (exponents.py), the elements by power of two, and `would_fit(x, dtype)` (fit.py), what a format
would make of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from ._version import __version__
from .capsule import Capsule, write_capsule
from .debug import DebugUnderflowOverflow, detect_overflow
from .errors import BatchLimitError, CapsuleError, NonFiniteError, TraceError
from .exponents import ExponentHistogram, exponent_histogram
from .finding import Cure, Finding
from .fit import Fit, narrowest, would_fit
from .frame import Frame
from .integrations.debug_option import follow_environment, patch_transformers, unpatch_transformers
from .precision import fp32_modules, run_in_fp32
from .ranges import AbsRange, TensorHealth, abs_range, abs_ranges, tensor_health
from .record import Record
from .replay import replay
from .report import Report
from .watch import Watch, watch

if TYPE_CHECKING:
    from .comparison import diff
    from .difference import Difference
    from .trace_file import Trace
else:
    # What reads traces is for after a run, and is imported when it is asked for.
    _LATER = {"Difference": "difference", "Trace": "trace_file", "diff": "comparison"}

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
