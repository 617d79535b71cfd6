"""Steps that moved weights by something else than meant: another rule, other gradients, another scale."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ...numerics._extension import instances_of
from ...util.job import rank_and_world_size
from ...util.place import Place
from .backwards import Backward
from .rules import given, is_known, spacing
from .samples import WeightSample, number
from .view import StepView, Suspect

# How far a step may be from the rule: in spacings of the format, and as a share of the update. The states are rounded
# too, which in 16 bits is up to 1 % at each operation.
_SPACINGS, _SHARE, _SHARE_16 = 4.0, 0.01, 0.15
# At least so many elements are off, and the whole update by so much.
_ELEMENTS, _ERROR = 0.05, 0.02
_GREW = 1.01
# Means over so unequal numbers of tokens do not add up to a mean. The last batch of an epoch may be smaller once.
_UNEQUAL = 1.5
# A second moment that does not decay does harm where it is so many times the squares of today's gradients.
_SPIKE, _STAYS = 64.0, 0.75
# How well the lost decay has to be known, as a share of it, and how near it has to be.
_KNOWN, _NEAR = 0.15, 0.3


def wrong(view: StepView) -> Iterator[Suspect]:
    """Yield what may have a fault of these kinds at this step."""
    if not getattr(view.optimizer, "_optimizer_step_post_hooks", None):
        for one in view.trained():
            yield from _against_rule(view, one)
    yield from _stale(view)
    yield from _accumulated(view)
    yield from _clipped(view)
    yield from _averaged_twice(view)
    for one in view.trained():
        yield from _moment_stays(view, one)
        yield from _decay_absorbed(view, one)
    if view.is_scaled and view.scale is not None:
        yield from _all(view, "not-unscaled", {"scale": view.scale})
    for module, label in view.replaced:
        yield Suspect("master-differs:at-first", module, label)
    for (module, label), share in view.masters.items():
        yield Suspect("master-differs", module, label, {"differs": share})


def _all(view: StepView, kind: str, numbers: dict[str, float] | None = None) -> Iterator[Suspect]:
    for one in view.trained():
        yield Suspect(kind, one.module, one.label, numbers or {})


def _against_rule(view: StepView, one: WeightSample) -> Iterator[Suspect]:
    if one.expected is None or one.before is None or one.after is None or one.has_moved is not True:
        return
    before, after, expected = one.before.double(), one.after.double(), one.expected
    if len(after) != len(expected) or not bool(expected.isfinite().all()):
        return
    meant = expected - before
    room = _room(one, meant)
    off = (after - expected).abs() > room
    norm = float(meant.norm())
    error = float((after - expected).norm()) / norm if norm else 1.0
    if int(off.sum()) < max(1, _ELEMENTS * len(off)) or error < _ERROR:
        return
    decay = view.option(one, "lr") * view.option(one, "weight_decay") * before
    for kind, sign in (("decayed-twice", 1), ("never-decayed", -1)):
        if bool(decay.any()) and bool(((after - expected + sign * decay).abs() <= room).all()):
            yield Suspect(kind, one.module, one.label)
            return
    ratio = float((after - before).dot(meant)) / norm**2 if norm else 0.0
    yield Suspect("wrong-update", one.module, one.label, {"ratio": ratio, "error": error})


def _room(one: WeightSample, meant: Tensor) -> Tensor:
    assert one.before is not None
    is_wide = one.before.dtype in (torch.float32, torch.float64)
    share = _SHARE if is_wide else _SHARE_16
    return _SPACINGS * spacing(one.before) + share * (meant.abs() + meant.abs().mean())


def _stale(view: StepView) -> Iterator[Suspect]:
    """Yield weights whose gradients of earlier steps were never set to zero."""
    if view.samples.step == 1 or view.previous is None:
        return
    seen = [probe for probe in view.probes if probe.arrivals]
    stale = [probe for probe in seen if probe.is_stale]
    if seen and len(stale) == len(seen):
        yield from _all(view, "missing-zero-grad")
    else:
        for probe in stale:
            yield Suspect("missing-zero-grad", *probe.key)


def _accumulated(view: StepView) -> Iterator[Suspect]:
    """Yield weights that got several backwards of one line, whose losses do not add up to a mean."""
    for probe in view.probes:
        lines: dict[Place, dict[int, Backward]] = {}
        for own, _, _ in probe.arrivals:
            if own.place is not None:
                lines.setdefault(own.place, {})[own.batch] = own
        for backwards in lines.values():
            # Several losses of one forward are no accumulation.
            count = len(backwards)
            if count < 2 or sum(own.place in lines for own, _, _ in probe.arrivals) != count:
                continue
            # A function that steps with any optimizer: one backward was for another model's.
            if len({own.num_steps for own in backwards.values()}) > 1:
                continue
            is_cleared = view.scale is None and probe.resets == len(probe.arrivals) - 1
            faults = [_factor_fault(own, count, view.scale) for own in backwards.values()]
            means = [own.elements or 0.0 for own in backwards.values()]
            if all(means) and max(means) > _UNEQUAL * min(means):
                numbers = {"backwards": count, "least": min(means), "most": max(means)}
                yield from _all(view, "accumulation:of-means", numbers)
                return
            if is_cleared or all(one is not None for one in faults):
                factor = 1.0 if faults[0] is None else faults[0]
                yield from _all(view, "accumulation", {"backwards": count, "factor": factor})
                return


def _factor_fault(own: Backward, count: int, scale: float | None) -> float | None:
    """Return the factor of a loss, where it is none that makes the sum of so many a mean; else None."""
    factors = [one for one in own.factors if one != 1 and (scale is None or abs(one - scale) > 1e-3 * scale)]
    divisor = prod(own.divisors)
    if not own.is_mean:
        return None
    if not factors and divisor == 1:
        return 1.0
    is_whole = divisor >= 2 and divisor == round(divisor)
    return prod(factors) / divisor if is_whole and divisor != count else None


def _clipped(view: StepView) -> Iterator[Suspect]:
    held = {id(x) for one in view.trained() if one.grad == "some" and (x := one.tensor()) is not None}
    for place in {one.place for one in view.clips}:
        batches = {one.batch for one in view.clips if one.place == place}
        if len(batches) > 1 and place is not None:
            yield from _all(view, "clipping:each-backward", {"times": len(batches)})
            return
    for clip in view.clips:
        if clip.at_step > max(clip.max_norm, clip.norm) * _GREW:
            own = {id(x) for one in clip.weights if (x := one()) is not None} or held
            for weight in view.trained():
                if id(weight.tensor()) in own & held:
                    numbers = {"norm": clip.at_step, "max_norm": clip.max_norm}
                    yield Suspect("clipping", weight.module, weight.label, numbers)
        elif view.scale is not None and view.scale > 1 and _is_ratio(clip.norm, clip.at_step, view.scale):
            yield from _all(view, "not-unscaled", {"scale": view.scale})


def _is_ratio(a: float, b: float, ratio: float) -> bool:
    return b > 0 and abs(a / b / ratio - 1) < _GREW - 1


def _averaged_twice(view: StepView) -> Iterator[Suspect]:
    """Yield weights under DDP, whose one loss in a step is a mean that is divided by the number of ranks."""
    ranks = rank_and_world_size()[1]
    own = [probe.arrivals[0][0] for probe in view.probes if len(probe.arrivals) == 1]
    if ranks < 2 or not any(one.is_mean and ranks in one.divisors for one in own):
        return
    reduced = {id(x) for ddp in instances_of(DistributedDataParallel) for x in ddp.parameters()}
    for one in view.trained():
        if id(one.tensor()) in reduced:
            yield Suspect("averaged-twice", one.module, one.label, {"ranks": ranks})


def _moment_stays(view: StepView, one: WeightSample) -> Iterator[Suspect]:
    """Yield a weight whose second moment should decay after larger gradients, and is rounded to what it was."""
    before, group = view.before(one.key), view.samples.groups[one.group or 0]
    old = None if before is None else before.state.get("exp_avg_sq")
    new, betas = one.state.get("exp_avg_sq"), group.get("betas")
    if before is None or before.gradient is None or betas is None or not isinstance(old, Tensor):
        return
    beta, steps = number(betas[1]), before.state.get("step")
    if beta is None or not isinstance(new, Tensor) or not isinstance(steps, float) or steps < 1:
        return
    squares = before.gradient.double().square()
    if not len(old) == len(new) == len(squares):
        return
    # A subnormal number does not decay in any format.
    is_normal = old > torch.finfo(torch.float32).smallest_normal / (1 - beta or 1)
    decays = is_normal & (beta * old.double() + (1 - beta) * squares < old.double())
    count, stays = int(decays.sum()), int((decays & (new == old)).sum())
    is_spike = float(old.double().mean()) > _SPIKE * (1 - beta**steps) * float(squares.mean())
    if is_spike and count >= len(old) / 2 and stays >= _STAYS * count:
        yield Suspect("absorbed:moment", one.module, one.label, {"absorbed": stays / count})


def _decay_absorbed(view: StepView, one: WeightSample) -> Iterator[Suspect]:
    """Yield a 16-bit weight that moves as the base class of its optimizer says, but for the decay."""
    group: dict[str, Any] = view.samples.groups[one.group or 0]
    decay = view.option(one, "lr") * view.option(one, "weight_decay")
    bases = [own.__name__ for own in type(view.optimizer).__mro__]
    rule = next((name for name in bases if is_known(name)), bases[0])
    if not decay or rule == bases[0] or one.before is None or one.after is None:
        return
    expected, x = given(rule, one, group), one.before.double()
    if expected is None or one.before.dtype not in (torch.bfloat16, torch.float16) or not bool(x.any()):
        return
    off = one.after.double() - expected
    share = float(off.dot(x) / x.dot(x))  # of the weight that is too much: the slope of a regression
    error = float(((off - share * x) * x).norm() / x.dot(x))
    if error < _KNOWN * decay and abs(share - decay) < _NEAR * decay:
        yield Suspect("never-decayed:absorbed", one.module, one.label, {"decay": decay})
