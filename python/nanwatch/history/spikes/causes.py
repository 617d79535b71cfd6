"""The rule for the cause of a spike."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...instrumentation.attention import BOUND, LARGEST
from ...report.spike import Cause, Departure
from ...util.modules import is_in
from ..peaks import OF_CALL

LOGITS = (LARGEST, BOUND)
_TARGET = re.compile(r"input\[(labels?|targets?)\]")  # for a loss inside the model


@dataclass(frozen=True, slots=True)
class Evidence:
    """Facts about the step in which a loss or the gradients jumped.

    `forward` and `backward` are the tensors that left their histories, in their order. `changed` are the weights that
    changed suddenly and are not back, and how many steps ago that was. `inputs` are those of `forward` that a batch
    gave to a model, `read_inputs` the modules whose inputs have magnitudes. `first_gradients` and `first_outputs` are
    the tensors that the backward and the forward begin with. `logits` are attention logits that have grown, `rates` a
    learning rate before and after it jumped. `optimizer` is a gradient or a state of an earlier step that made the
    optimizer's step too large, `spoilt` a gradient that was changed after its backward. `adam` is for the report.
    """

    jumps: Sequence[Departure]
    forward: Sequence[Departure]
    backward: Sequence[Departure] = ()
    changed: Mapping[Departure, int] = field(default_factory=dict)
    inputs: Sequence[Departure] = ()
    read_inputs: frozenset[str] = frozenset()
    first_gradients: Sequence[tuple[str, str]] = ()
    first_outputs: Sequence[tuple[str, str]] = ()
    logits: Departure | None = None
    rates: tuple[float, float] | None = None
    optimizer: Departure | None = None
    spoilt: Departure | None = None
    adam: tuple[str, str, float] | None = None


def cause_of(evidence: Evidence) -> tuple[Cause, Departure | None]:
    """Return the class of the cause, and the tensor that shows it."""
    forward, logits = evidence.forward, evidence.logits
    calls = [one for one in forward if OF_CALL.match(one.label) or one.label in LOGITS]
    first = calls[0] if calls else None
    taken = [one for one in calls if one.label.startswith("input")]
    makers = [one.module for one in calls if one.label.startswith("output")]
    if first is not None and all(_TARGET.match(one.label) for one in calls):
        return "loss", first
    # A batch is drawn without regard to weights. In a GAN, the input of one model is what another has made.
    if any(all(is_in(module, one.module) for module in makers) for one in evidence.inputs):
        return "input", taken[0]
    if evidence.rates is not None:
        return "learning rate", first
    if evidence.spoilt is not None:
        return "gradient", evidence.spoilt
    if evidence.optimizer is not None:
        return "optimizer", evidence.optimizer
    found = next((one for one in calls if one.label in LOGITS), logits)
    if found is not None and (first is None or is_in(first.module, found.module)):
        return "attention", found
    weight = _weight_of(evidence, calls, set(makers) - {one.module for one in taken})
    if weight is not None:
        return "weight", weight
    if first is not None:
        is_first = (first.module, first.label) in evidence.first_outputs
        return "input" if is_first and first.module not in evidence.read_inputs else "module", first
    # No gradient changes the loss of its own step.
    if evidence.backward and not any(one.label == "loss" for one in evidence.jumps):
        start = evidence.backward[0]
        is_loss = (start.module, start.label) in evidence.first_gradients
        return "loss" if is_loss else "gradient", start
    return "loss", None


def _weight_of(evidence: Evidence, calls: Sequence[Departure], makers: set[str]) -> Departure | None:
    """Return the weight of one of `makers`, which make an unusual output of usual inputs, or one before all calls."""
    forward = evidence.forward
    now = [one for one in forward if one not in calls]
    earlier = [one for one, ago in evidence.changed.items() if ago]
    found = next((one for one in [*now, *earlier] if one.module in makers), None)
    if found is None and now and (not calls or forward.index(now[0]) < forward.index(calls[0])):
        found = now[0]
    return found
