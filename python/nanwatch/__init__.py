"""nanwatch: the flight recorder for numerics in PyTorch.

A module call goes from `instrumentation` (wrappers before the calls) to `recording` (tensors to frames, a ring of the
latest), at a failure to `session` (what to do about it), `diagnosis` (the batch again: operation, line, cures) and
`report` (text, JSON, HTML). docs/architecture.md has the rooms and the way through them.

`watch(model)` starts all of it; `abs_range(x)` and `tensor_health(x)` are the reduction alone. Beside it stands
`would_fit(x, dtype)`, what a format would make of the elements.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from ._version import __version__
from .numerics import _extension as _extension  # torch.ops.nanwatch.*

if TYPE_CHECKING:
    from .capsule.capsule import Capsule as Capsule
    from .capsule.capsule import write_capsule as write_capsule
    from .compare.models import compare as compare
    from .compare.twice import twice as twice
    from .instrumentation.functions import watched as watched
    from .integrations.debug import DebugUnderflowOverflow as DebugUnderflowOverflow
    from .integrations.debug import detect_overflow as detect_overflow
    from .numerics.fit import would_fit as would_fit
    from .numerics.ranges import abs_range as abs_range
    from .numerics.ranges import abs_ranges as abs_ranges
    from .numerics.ranges import fingerprint as fingerprint
    from .numerics.ranges import tensor_health as tensor_health
    from .precision.precision import run_in_fp32 as run_in_fp32
    from .report.finding import Finding as Finding
    from .report.report import NonFiniteError as NonFiniteError
    from .report.report import Report as Report
    from .scan.scan import scan as scan
    from .session.api import Watch as Watch
    from .session.api import replay as replay
    from .session.api import watch as watch
    from .session.kinds import Audit as Audit
    from .session.kinds import Trace as Trace
    from .sinks.sink import Sink as Sink
    from .trace.comparison import diff as diff
else:
    # Public names and the modules that define them. A name is imported when it is first asked for.
    _MODULES = {
        "capsule.capsule": ("Capsule", "write_capsule"),
        "scan.scan": ("scan",),
        "compare.models": ("compare",),
        "compare.twice": ("twice",),
        "instrumentation.functions": ("watched",),
        "integrations.notebook": ("load_ipython_extension", "unload_ipython_extension"),
        "integrations.debug": ("DebugUnderflowOverflow", "detect_overflow"),
        "sinks.sink": ("Sink",),
        "numerics.fit": ("would_fit",),
        "numerics.ranges": ("abs_range", "abs_ranges", "fingerprint", "tensor_health"),
        "precision.precision": ("run_in_fp32",),
        "report.finding": ("Finding",),
        "report.report": ("NonFiniteError", "Report"),
        "session.api": ("Watch", "replay", "watch"),
        "session.kinds": ("Audit", "Trace"),
        "trace.comparison": ("diff",),
    }
    _MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}
    __all__ = ["__version__", *(name for name in _MODULE_OF if "ipython" not in name)]

    def __getattr__(name: str) -> object:
        if name not in _MODULE_OF:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
        return value

    class _Package(ModuleType):
        """The package, in which `compare` is the function, though a room has its name too."""

        def __setattr__(self, name: str, value: object) -> None:
            # The import system sets each room that it has loaded.
            if name not in _MODULE_OF or not isinstance(value, ModuleType):
                super().__setattr__(name, value)

    sys.modules[__name__].__class__ = _Package

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


if os.environ.get("NANWATCH_TRANSFORMERS") == "1":
    from .integrations.debug import patch_transformers as _patch_transformers

    _patch_transformers()
