"""Weights that move and are not meant to: frozen ones, and those that decay wrongly."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .samples import WeightSample, number
from .view import StepView, Suspect

# A weight that somebody multiplies between two steps keeps at least this much of it.
_KEPT = 0.5
# Keys of groups that mean weight decay, in one optimizer or another.
_DECAYS = frozenset({"decay", "wd", "weight_decay", "weight_decay_rate", "l2", "l2_reg", "lambda"})


def not_meant(view: StepView) -> Iterator[Suspect]:
    """Yield what may have a fault of these kinds at this step."""
    for one in view.samples.of_optimizer():
        if not (one.is_trained and one.is_meant) and one.has_moved:
            yield Suspect("frozen-moved", one.module, one.label)
    yield from _never_decayed(view)
    yield from _decayed_twice(view)


def _never_decayed(view: StepView) -> Iterator[Suspect]:
    matrices = [one for one in view.trained() if len(one.shape) > 1]
    # A key that the optimizer does not read.
    ignored = {
        place
        for place, group in enumerate(view.samples.groups)
        for key in group.keys() & _DECAYS - view.optimizer.defaults.keys()
        if number(group[key])
    }
    for one in matrices:
        if one.group in ignored and not view.option(one, "weight_decay"):
            yield Suspect("never-decayed", one.module, one.label)
    if not any(number(group.get("weight_decay")) for group in view.samples.groups):
        return
    if not any(view.option(one, "weight_decay") for one in matrices):
        for one in matrices:
            yield Suspect("never-decayed", one.module, one.label)


def _decayed_twice(view: StepView) -> Iterator[Suspect]:
    penalized = {number for probe in view.probes for own, _, _ in probe.arrivals for number in own.penalized}
    for one in view.trained():
        decay = view.option(one, "weight_decay")
        if not decay:
            continue
        before = view.before(one.key)
        if id(one.tensor()) in penalized or (before is not None and _was_shrunk(before, one)):
            yield Suspect("decayed-twice", one.module, one.label, {"weight_decay": decay})


def _was_shrunk(before: WeightSample, one: WeightSample) -> bool:
    """Return whether all elements were multiplied by one number since the step before."""
    if before.after is None or one.before is None or len(before.after) != len(one.before):
        return False
    old, new = before.after.double(), one.before.double()
    square = float(old.dot(old))
    factor = float(old.dot(new)) / square if square else 1.0
    # The products are rounded.
    eps = torch.finfo(one.before.dtype).eps
    return _KEPT <= factor < 1 - 2 * eps and bool(((new - factor * old).abs() <= eps * old.abs()).all())
