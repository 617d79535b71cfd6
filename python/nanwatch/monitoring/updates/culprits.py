"""The line to look at first for each kind of fault."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable

from ...util.modules import is_in
from ...util.place import Place
from . import blame
from .suspicions import Fault
from .view import StepView

_NARROW = frozenset({"bfloat16", "float16", "half"})
_AT_BACKWARD = frozenset(
    {
        "missing-zero-grad",
        "accumulation",
        "no-gradient",
        "zero-gradient",
        "train-mode-wrong",
        "averaged-twice",
    }
)
_AT_STEP = frozenset({"not-unscaled", "skipped-step", "compiled-step-skipped"})


def line_of(fault: Fault, view: StepView) -> Callable[[], Place | None]:
    """Return what looks for the line that is to blame."""
    kind = fault.kind.partition(":")[0]
    step = blame.place_of(sys._getframe(1)) if kind in _AT_STEP else None
    lines = (own.place for probe in view.probes for own, _, _ in probe.arrivals)
    backward = next((one for one in lines if one is not None), None) if kind in _AT_BACKWARD else None

    def find() -> Place | None:
        return _cause(fault, view) or step or backward or blame.where_made(view.optimizer)

    return find


def _cause(fault: Fault, view: StepView) -> Place | None:
    """Return the line of the call that did it, None where no kind of call is known to."""
    kind = fault.kind.partition(":")[0]
    if kind == "frozen-moved":
        if fault.kind.endswith("statistics"):
            return blame.where_called("train")
        own = [one for one in view.samples.weights if is_in(one.module, fault.module)]
        is_trained = any(one.is_trained and not one.is_meant for one in own)
        return (is_trained and blame.where_frozen(is_frozen=False)) or blame.where_frozen()
    if kind in ("clipping", "not-unscaled") and view.clips:
        return view.clips[-1].place
    if kind == "absorbed":
        return (
            blame.where_called("to", _narrows) or blame.where_called("bfloat16") or blame.where_called("half")
        )
    if kind == "zero-lr":
        return blame.where_called("step", _is_scheduler)
    if kind == "train-mode-wrong":
        return blame.where_called("eval")
    if kind == "tie-broken":
        return blame.where_called("to_empty")
    if kind == "no-gradient":
        own = [one for one in view.samples.of_optimizer() if fault.label in (None, one.label)]
        is_frozen = own and not any(one.is_trained for one in own)
        if is_frozen:
            return blame.where_frozen()
        # A loss is detached to be logged.
        return blame.where_called("checkpoint") or blame.where_called(
            "detach", lambda call: "loss" not in _owner(call)
        )
    return None


def _narrows(call: ast.Call) -> bool:
    given = (*call.args, *(one.value for one in call.keywords))
    return any(isinstance(one, ast.Attribute) and one.attr in _NARROW for one in given)


def _is_scheduler(call: ast.Call) -> bool:
    return "sched" in _owner(call)


def _owner(call: ast.Call) -> str:
    """Return the name of the object whose method is called, in small letters."""
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    return str(owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")).lower()
