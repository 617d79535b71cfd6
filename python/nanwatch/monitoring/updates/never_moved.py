"""Weights that are to be trained and do not move: no gradient, no optimizer, updates that round away."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch

from ...util.modules import is_in
from .rules import float32_moves, spacing
from .samples import WeightSample, same_bits
from .view import StepView, Suspect, ancestors

# A weight has a fault when so much of its update is lost, by elements and by magnitude.
_ABSORBED, _LOST = 0.75, 0.5
# A part without gradients whose result nobody is seen to use may be a head that this loss leaves out, unless it is
# this much of the model.
_LARGE = 0.5


def never_moved(view: StepView) -> Iterator[Suspect]:
    """Yield what may have a fault of these kinds at this step."""
    yield from _no_gradient(view)
    for one in view.trained():
        yield from _unmoved(view, one)
    if view.is_first:
        yield from _outside(view)


def _no_gradient(view: StepView) -> Iterator[Suspect]:
    called = {call.module for call in view.calls}
    cleared = {probe.key for probe in view.probes if any(came for _, _, came in probe.arrivals)}
    trained = list(view.trained())
    if not trained:  # and yet gradients come, or somebody has made them
        for one in view.samples.of_optimizer():
            if one.is_meant:
                yield Suspect("no-gradient", one.module, one.label)
        return
    without = [one for one in trained if one.grad == "none" and (one.module in called or one.key in cleared)]
    if not without:
        return
    names = {one.module for one in without}
    for above in {above for name in names for above in ancestors(name) if above}:
        if all(one in without for one in trained if is_in(one.module, above)):
            names.add(above)
    share = sum(one.size for one in without) / max(1, sum(one.size for one in trained))
    if share >= _LARGE or any(one.key in cleared for one in without) or _is_used(view, names):
        for one in without:
            yield Suspect("no-gradient", one.module, one.label)


def _is_used(view: StepView, names: set[str]) -> bool:
    """Return whether a later call of another module takes what these gave, by shape and ends."""
    made: set[tuple[object, ...]] = set()
    for call in view.calls:
        if call.module in names:
            made |= call.outputs
        elif made & call.inputs and not any(is_in(name, call.module) for name in names):
            return True
    return False


def _unmoved(view: StepView, one: WeightSample) -> Iterator[Suspect]:
    if one.lr == 0:
        if one.grad == "some":
            yield Suspect("zero-lr", one.module, one.label, {"lr": 0.0})
        return
    before = view.before(one.key)
    if one.grad == "zero":
        # A branch behind a factor of 0 gets its gradient once the factor has moved.
        if before is not None and before.lr and not _is_idle(view, one) and not _cancels(view, one):
            yield Suspect("zero-gradient", one.module, one.label)
        return
    if one.grad == "none":
        return
    if one.expected is not None and one.before is not None and one.after is not None:
        # A rate that rises still becomes what was meant.
        if before is None or before.lr is None or one.lr is None or one.lr <= before.lr:
            yield from _absorbed(one)
        moves = bool((one.expected.to(one.before.dtype) != one.before).any())
        if not moves or _changes(one):
            return
    if one.has_moved is False and one.lr is not None:
        kind = "compiled-step-skipped" if view.is_compiled else "skipped-step"
        if one.expected is not None or one.before is None or one.before.dtype == torch.float32:
            yield Suspect(kind, one.module, one.label)


def _changes(one: WeightSample) -> bool:
    return one.has_moved is not False


def _absorbed(one: WeightSample) -> Iterator[Suspect]:
    if one.before is None or one.after is None or one.expected is None:
        return
    if one.before.dtype not in (torch.bfloat16, torch.float16) or len(one.expected) != len(one.after):
        return
    update = one.expected - one.before.double()
    moving = (update != 0) & update.isfinite()
    count = int(moving.sum())
    if not count:
        return
    stays = moving & (one.after == one.before)
    lost = float(update[stays].abs().sum() / update[moving].abs().sum())
    share = int(stays.sum()) / count
    if share >= _ABSORBED and lost >= _LOST:
        chances = (update.abs() / spacing(one.before)).clamp_max(1.0)
        yield Suspect(
            "absorbed",
            one.module,
            one.label,
            {
                "absorbed": share,
                "float32": int((float32_moves(one) & moving).sum()) / count,
                "stochastic": float(chances[moving].mean()),
                "lost": lost,
            },
        )


def _cancels(view: StepView, one: WeightSample) -> bool:
    """Return whether it is a bias beside a weight with a gradient: in a difference of outputs it falls out."""
    beside = view.samples.of_optimizer() if one.label == "bias" else ()
    return any(other.module == one.module and other.grad == "some" for other in beside)


def _is_idle(view: StepView, one: WeightSample) -> bool:
    """Return whether the module may be an expert without tokens: nobody called it, or others got the same input."""
    own = [call for call in view.calls if is_in(one.module, call.module) and call.module]
    if not any(call.module == one.module for call in own):
        return bool(view.calls)
    if any(call.is_empty for call in own):
        return True
    active = {other.module for other in view.trained() if other.grad == "some"}
    for call in own:
        for other in view.calls:
            is_apart = not is_in(one.module, other.module) and not is_in(other.module, call.module)
            if is_apart and other.inputs & call.inputs and any(is_in(name, other.module) for name in active):
                return True
    return False


def _outside(view: StepView) -> Iterator[Suspect]:
    """Yield trained weights that get gradients, and that neither an optimizer has nor anything moves."""
    if view.previous is None:
        return
    weights = (one for one in view.samples.weights if one.key not in view.mastered)
    outside = [one for one in weights if one.is_trained and one.group is None]
    missing = [
        one
        for one in outside
        if (before := view.before(one.key)) is not None
        and before.before is not None
        and one.before is not None
        and same_bits(before.before, one.before)
    ]
    # The search for optimizers takes 10 ms for a million objects.
    if not missing:
        return
    others = view.others()
    missing = [one for one in missing if id(one.tensor()) not in others]
    # The optimizer has others of the same shapes: those of a copy, or what these were before they were replaced.
    has_copy = Counter(one.shape for one in missing) <= Counter(view.samples.foreign)
    kind = "other-module-trained" if has_copy else "not-in-optimizer"
    for one in missing:
        if one.grad == "some" or has_copy:
            yield Suspect(kind, one.module, one.label)
