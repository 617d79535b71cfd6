"""nanwatch: the flight recorder for numerics in PyTorch.

The flow, one file a step (python/nanwatch/):

    module call    calls.py     what stands between a module and its call while it is watched
    -> walk        walk.py      the tensors in its weights, buffers, inputs and outputs, and their labels
    -> range       ranges.py    abs_min, abs_max, isfinite of each, in one pass over memory (csrc/range.h)
    -> record      record.py    one tensor: label, shape, dtype, range
    -> frame       frame.py     one call: its records
    -> recorder    recorder.py  the latest frames, bounded
    -> finding     finding.py   the first non-finite record, and whether its module made or received it
    -> report      report.py    frames and finding, as text, JSON and HTML (text.py, html.py)
    -> postmortem  postmortem.py the failed batch once more: the operation, the line, the cures that work
    -> capsule     capsule.py   a module call with all it needs, to `replay` elsewhere (replay.py)

`watch(model)` starts all of it; `abs_range(x)` and `tensor_health(x)` are the reduction alone.
"""

from __future__ import annotations

from .capsule import Capsule, write_capsule
from .debug import DebugUnderflowOverflow, detect_overflow
from .errors import BatchLimitError, CapsuleError, NonFiniteError
from .finding import Cure, Finding
from .frame import Frame
from .precision import fp32_modules, run_in_fp32
from .ranges import AbsRange, TensorHealth, abs_range, abs_ranges, tensor_health
from .record import Record
from .replay import replay
from .report import Report
from .watch import Watch, watch

__version__ = "0.1.0"

__all__ = [
    "AbsRange",
    "BatchLimitError",
    "Capsule",
    "CapsuleError",
    "Cure",
    "DebugUnderflowOverflow",
    "Finding",
    "Frame",
    "NonFiniteError",
    "Record",
    "Report",
    "TensorHealth",
    "Watch",
    "abs_range",
    "abs_ranges",
    "detect_overflow",
    "fp32_modules",
    "replay",
    "run_in_fp32",
    "tensor_health",
    "watch",
    "write_capsule",
]
