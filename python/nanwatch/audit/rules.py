"""The rules of an audit: what a step shows that a user did not mean. Each yields Suspects.

A step does not show an evaluation in training mode: `Evaluations` look at the calls between steps.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise, permutations
from math import inf, isclose, prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..instrumentation.wrapped_names import named_modules
from ..report.finding import Place
from ..util.messages import suppressed
from ..util.program import is_in
from .window import Key, Step, WeightSample, held_by_optimizers, number, same_bits, user_line

# A weight has a fault when so much of its update is lost, by elements and by magnitude.
_ABSORBED, _LOST = 0.75, 0.5
_SHORT = (torch.bfloat16, torch.float16)
_GREW = 1.01  # a norm is larger beyond rounding
# Means over so unequal numbers of tokens do not add up to a mean. Masked tokens of 8 rows of 64 are up to 1.27 apart,
# which is taken for healthy. The last batch of an epoch may be smaller once.
_UNEQUAL = 1.3


class Suspect(NamedTuple):
    """A weight that may have a fault of this kind; `label` is None where a module is meant."""

    kind: str
    module: str
    label: str | None
    numbers: Mapping[str, float] = {}


def _suspect(kind: str, weight: WeightSample, **numbers: float) -> Suspect:
    return Suspect(kind, weight.module, weight.label, numbers)


def suspects_of(step: Step) -> Iterator[Suspect]:
    """Yield what may be wrong with this step. A rule that raises is left out."""
    for rule in _RULES if step.skipped_with is None else (_not_stepped,):
        try:
            yield from list(rule(step))
        except Exception:
            suppressed("a rule of the audit raised")


def ancestors(module: str) -> list[str]:
    """Return the names of the module and of all that it is in, up to the root."""
    parts = module.split(".")
    return [".".join(parts[:length]) for length in range(len(parts), -1, -1)]


def _no_gradient(step: Step) -> Iterator[Suspect]:
    """Yield weights without a gradient whose modules were called, unless their output may be a leftover."""
    trained = step.trained
    if not trained:  # and yet gradients come, or somebody has made them
        yield from (_suspect("no-gradient", weight) for weight in step.in_optimizer if weight.is_meant)
        return
    # A user sets some to None on purpose, as those of a last layer that rests, and never all.
    cleared = {weight.key for weight in trained if weight.arrivals}
    without = [weight for weight in trained if weight.grad == "none"]
    if not (cleared and len(without) == len(trained)):
        without = [weight for weight in without if weight.module in step.calls and weight.key not in cleared]
    # A module that returns several tensors, of which a user may take one, as a BERT with its pooler where a tagger asks
    # for the tokens alone. The outputs of the outermost module go to the user's code.
    fed = {weight.module for weight in trained if weight.grad != "none"}
    several = [name for name, call in step.calls.items() if name and call.num_outputs > 1]
    forks = [name for name in several if any(is_in(module, name) for module in fed)]
    for weight in without:
        if not any(weight.module != name and is_in(weight.module, name) for name in forks):
            yield _suspect("no-gradient", weight)


def _zero_gradient(step: Step) -> Iterator[Suspect]:
    """Yield weights with a gradient of 0, unless a clip of an infinite norm has made it 0."""
    active = [weight for weight in step.trained if weight.grad == "some"]
    # A loss that has become 0, as that of triplets which are far enough apart, cuts off nothing.
    if (not active and step.has_learned) or any(clip.total == inf for clip in step.clips):
        return
    modules = {weight.module for weight in active}
    for weight in [each for each in step.trained if each.grad == "zero"]:
        before = step.previous.get(weight.key)
        # A bias beside a weight with a gradient falls out of a difference of outputs, as in front of a batch norm. The
        # weight may be a parametrization's.
        siblings = [each for each in active if is_in(each.module, weight.module) and each.label != "bias"]
        # A branch behind a factor of 0 gets its gradient once the factor has moved.
        is_late = weight.lr != 0 and before is not None and bool(before.lr)
        cancels = weight.label == "bias" and siblings
        if is_late and not cancels and not _is_idle(step, weight, modules):
            yield _suspect("zero-gradient", weight)


def _is_idle(step: Step, weight: WeightSample, active: set[str]) -> bool:
    """Return whether the module may be an expert without tokens: nobody called it, or others got the same input."""
    if weight.module not in step.calls:
        return bool(step.calls)
    for name in ancestors(weight.module):
        inputs = step.calls[name].inputs if name and name in step.calls else set()
        if any(0 in shape for shape, _, _ in inputs):
            return True
        for rival, call in step.calls.items():
            is_apart = not is_in(weight.module, rival) and not is_in(rival, name)
            if is_apart and inputs & call.inputs and any(is_in(module, rival) for module in active):
                return True
    return False


def _not_stepped(step: Step) -> Iterator[Suspect]:
    """Yield weights with a gradient that the loop does not step: by a rate of 0, or as the GradScaler skips it."""
    scale = step.skipped_with
    form, numbers = ("", {"lr": 0.0}) if scale is None else (":skipped", {"scale": scale})
    for weight in step.trained:
        if (scale is not None or weight.lr == 0) and weight.grad == "some" and weight.is_meant:
            yield _suspect(f"not-stepped{form}", weight, **numbers)


def _absorbed(step: Step) -> Iterator[Suspect]:
    """Yield weights whose update rounds away, at a rate that does not rise: it may still become what was meant."""
    for weight in [each for each in step.trained if each.grad != "zero"]:
        values, after, update = weight.before, weight.after, update_of(step, weight)
        before = step.previous.get(weight.key, weight)
        if values is None or after is None or update is None or (weight.lr or 0.0) > (before.lr or 0.0):
            continue
        moving, share = _lost_share(values, update, after)
        if share >= _ABSORBED:
            count = int(moving.sum())
            in_float32 = (values.float() != (values.double() - update).float()) & moving
            size = values.abs().cpu()
            spacing = torch.nextafter(size, torch.full_like(size, inf)).double() - size.double()
            chances = (update.abs() / spacing.to(update.device)).clamp_max(1.0)
            numbers = {"float32": int(in_float32.sum()) / count, "stochastic": float(chances[moving].mean())}
            yield _suspect("absorbed", weight, absorbed=share, **numbers)


def _lost_share(values: Tensor, update: Tensor, after: Tensor) -> tuple[Tensor, float]:
    """Return which elements were to move, and the share that stays; 0.0 while most of the update is kept."""
    moving = (update != 0) & update.isfinite()
    stays = moving & (after == values)
    is_lost = bool(update[stays].abs().sum() >= _LOST * update[moving].abs().sum())
    return moving, int(stays.sum()) / max(1, int(moving.sum())) * is_lost


def update_of(step: Step, weight: WeightSample) -> Tensor | None:
    """Return what a step of SGD, Adam or AdamW subtracted from a 16-bit weight, in float64 and without weight decay.

    Other optimizers may round stochastically, or keep what was lost.
    """
    x, kind = weight.tensor(), type(step.optimizer)
    if x is None or weight.group is None or x.dtype not in _SHORT:
        return None
    group, lr = step.optimizer.param_groups[weight.group], weight.lr or 0.0
    parts = {name: part.double() for name, part in weight.end.items()}
    if kind is torch.optim.SGD and weight.gradient is not None:
        return lr * parts.get("momentum_buffer", weight.gradient.double())
    if kind not in (torch.optim.Adam, torch.optim.AdamW) or not {"exp_avg", "exp_avg_sq"} <= parts.keys():
        return None
    count, eps = number(step.optimizer.state[x].get("step")) or 1.0, float(group["eps"])
    first, second = (float(1 - beta**count) for beta in group["betas"])
    return lr * (parts["exp_avg"] / first) / ((parts["exp_avg_sq"] / second).sqrt() + eps)


def _rounded_between_steps(step: Step) -> Iterator[Suspect]:
    """Yield weights that are rounded to 16 bits after each step, or whose states are, and lose what it changed."""
    for weight in step.trained:
        previous = step.previous.get(weight.key, weight)
        for name in previous.begin.keys() & previous.end.keys() & weight.begin.keys():
            before, written, now = previous.begin[name], previous.end[name], weight.begin[name]
            if any(torch.equal(written.to(short).to(now.dtype), now) for short in _SHORT):
                share = _lost_share(before, before - written, now)[1]
                if share >= _ABSORBED:
                    yield _suspect("absorbed:state", weight, absorbed=share)
                    break


def _outside(step: Step) -> Iterator[Suspect]:
    """Yield weights that get gradients, and that neither an optimizer has nor anything moves."""
    outside = [weight for weight in step.weights.values() if weight.is_trained and weight.group is None]
    known = [weight for weight in outside if weight.is_meant and weight.key in step.previous]
    pairs = [(weight, step.previous[weight.key]) for weight in known]
    resting = [(weight, before) for weight, before in pairs if same_bits(before.before, weight.before)]
    others = held_by_optimizers(but=step.optimizer) if resting else set()
    missing = [(weight, before) for weight, before in resting if id(weight.tensor()) not in others]
    # The optimizer has others of the same shapes: those of a copy, or what these were before they were replaced. In
    # another format these are masters of 16-bit weights, whose updates may round away for a while.
    ids = {id(weight.tensor()) for weight in step.weights.values()}
    foreign = [x for group in step.optimizer.param_groups for x in group["params"] if id(x) not in ids]
    shapes, formats = Counter(weight.shape for weight, _ in missing), {x.dtype for x in foreign}
    has_copy = shapes <= Counter(tuple(x.shape) for x in foreign)
    for weight, before in missing:
        # The gradient of a head whose task is over, and its optimizer gone, stays as it is.
        is_left = same_bits(before.gradient, weight.gradient)
        if has_copy and weight.before is not None and weight.before.dtype in formats:
            yield _suspect("other-module-trained", weight)
        elif not has_copy and weight.grad == "some" and not is_left:
            yield _suspect("not-in-optimizer", weight)


def _frozen_moved(step: Step) -> Iterator[Suspect]:
    for weight in step.in_optimizer:
        has_moved = weight.after is not None and not same_bits(weight.before, weight.after)
        if has_moved and not (weight.is_trained and weight.is_meant):
            yield _suspect("frozen-moved", weight)


def _stale(step: Step) -> Iterator[Suspect]:
    """Yield weights whose `.grad` holds gradients of before the latest step, or of another optimizer's backward."""
    for weight in step.trained if step.previous else ():
        pairs = [(early, late) for early, late in pairwise(weight.arrivals) if late.was_full]
        is_foreign = any(early.place != late.place and early.time < late.time for early, late in pairs)
        if is_foreign or (weight.arrivals and all(arrival.was_full for arrival in weight.arrivals)):
            yield _suspect("missing-zero-grad", weight)


def _means_of_unequal_counts(step: Step) -> Iterator[Suspect]:
    """Yield weights that got several backwards of one line, whose losses are means over unequal counts.

    Each loss is divided by the number of backwards, and not by its part of all elements. A loop over tasks divides by
    nothing, and means what it adds.
    """
    for arrivals in (weight.arrivals for weight in step.in_optimizer):
        backwards = {(arrival.place, arrival.batch): arrival for arrival in arrivals}
        for place in dict.fromkeys(backward.place for backward in backwards.values()):
            line = [backward for backward in backwards.values() if backward.place == place]
            counts = [backward.elements or 0.0 for backward in line]
            shares = [prod(backward.factors) / (backward.elements or 1.0) for backward in line]
            are_divided = all({*backward.factors} - {1.0, step.scale} for backward in line)
            are_unequal = all(max(each) > _UNEQUAL * min(each) > 0 for each in (counts, shares))
            if are_divided and are_unequal:
                numbers = {"backwards": len(counts), "least": min(counts), "most": max(counts)}
                yield from (_suspect("accumulation", weight, **numbers) for weight in step.trained)
                return


def _clips(step: Step) -> Iterator[Suspect]:
    """Yield weights that a clip has no effect on, whose gradients it has made 0, or lost in the optimizer's eps."""
    with_gradient = [weight for weight in step.trained if weight.grad != "none"]
    group = step.optimizer.param_groups[0]
    eps = (number(group.get("eps")) or 0.0) if "betas" in group else 0.0
    for place, clip in enumerate(step.clips):
        clipped = [weight for weight in with_gradient if id(weight.tensor()) in clip.ids or not clip.ids]
        gradients = [weight.gradient.double().abs() for weight in clipped if weight.gradient is not None]
        size = float(torch.cat(gradients).median()) if gradients else 0.0
        is_at_work = clip.total > clip.max_norm > 0
        later = [each for each in step.clips[place + 1 :] if (each.ids, each.place) == (clip.ids, clip.place)]
        kind, norm = "", clip.total
        if any(each.sources > clip.sources for each in later):
            kind = "clipping:each-backward" if is_at_work else ""
        elif clip.at_step > max(clip.max_norm, clip.norm) * _GREW:
            is_noise = clip.sources == step.sources and clip.has_turned
            kind, norm = "" if is_noise else "clipping", clip.at_step
        elif step.scale not in (None, 1) and isclose(clip.norm, clip.at_step * step.scale, rel_tol=0.01):
            yield from (_suspect("not-unscaled", weight, scale=step.scale) for weight in step.trained)
        elif is_at_work and clip.total == inf and all(weight.grad == "zero" for weight in clipped):
            kind = "clipping:to-zero" if gradients else ""
        elif is_at_work and 0 < size < eps <= size * clip.total / clip.max_norm:
            kind = "clipping:below-eps"
        if kind:
            yield from (_suspect(kind, weight, norm=norm, max_norm=clip.max_norm) for weight in clipped)


def _scaled(step: Step) -> Iterator[Suspect]:
    """Yield the weights of a step whose gradients nobody has divided by the loss scale. Fused steps divide."""
    state = getattr(step.scaler, "_per_optimizer_states", {}).get(id(step.optimizer), {})
    is_fused = isinstance(getattr(step.optimizer, "grad_scale", None), Tensor)
    if step.scale is not None and not is_fused and getattr(state.get("stage"), "name", "READY") == "READY":
        yield from (_suspect("not-unscaled", weight, scale=step.scale) for weight in step.trained)


def _divided_by_the_next_scale(step: Step) -> Iterator[Suspect]:
    """Yield weights whose gradients were divided by a factor of the next step's loss, and not of their own."""
    for before in (step.previous.get(weight.key) for weight in step.trained):
        if step.scale is not None or before is None or before.gradient is None or len(before.arrivals) != 1:
            continue
        first, factors = before.arrivals[0].gradient, before.arrivals[0].factors
        for divisor in step.factors - {*factors, 1.0}:
            if first is not None and first.any() and torch.equal(first / divisor, before.gradient):
                yield _suspect("not-unscaled:other", before, scale=max(factors), divisor=divisor)


def copies_among(weights: Iterable[WeightSample]) -> Iterator[tuple[Key, ...]]:
    """Yield the trained weights that have equal values, as a tie has that broke, or a module and its copy."""
    groups: dict[tuple[object, ...], list[Key]] = {}
    for weight in weights:
        values = weight.before
        if weight.is_trained and values is not None and not _is_constant(values):
            content = values.cpu().contiguous().view(torch.uint8).numpy().tobytes()
            groups.setdefault((weight.shape, values.dtype, content), []).append(weight.key)
    yield from (tuple(keys) for keys in groups.values() if len(keys) > 1)


def _is_constant(values: Tensor | None) -> bool:
    return values is None or not bool((values != values[0]).any())


def _tie_broken(step: Step) -> Iterator[Suspect]:
    """Yield copies of embeddings, once tied, that the steps have made different. Tables of several modules are tied."""
    modules = {item.name: item.module for item in named_modules(step.model)} if step.window.copies else {}
    holders = Counter(id(x) for module in modules.values() for x in module._parameters.values())
    for weights in step.copied:
        tables = [weight for weight in weights if isinstance(modules.get(weight.module), nn.Embedding)]
        parted = [table for table in tables if table.after is not None and holders[id(table.tensor())] == 1]
        for weight in weights:
            has_parted = any(not same_bits(weight.after, table.after) for table in parted)
            if weight not in tables and weight.after is not None and has_parted:
                yield _suspect("tie-broken", weight)


def _copy_rests(step: Step) -> Iterator[Suspect]:
    """Yield weights of a module that nothing calls or writes, while the one that began as its copy is trained.

    Only a pair counts: of more copies, as experts are, those without tokens rest too. A moving average rests as well,
    but code writes it. So does the target of a Q-function, but code calls it without grad mode. A part that begins
    alike in all layers, as A_log of Mamba, makes no layer a copy.
    """
    pairs = [order for pair in step.copied if len(pair) == 2 for order in permutations(pair)]
    alike = {(weight.key, copy.key) for weight, copy in pairs}
    for weight, copy in pairs:
        rests = weight.group is not None and weight.grad == "none" and weight.module not in step.window.called
        before = step.previous.get(weight.key)
        is_written = before is not None and not same_bits(before.after, weight.before)
        if rests and not is_written and copy.grad == "some":
            # The two modules that have these weights at the same place.
            here, there = weight.module.split("."), copy.module.split(".")
            while len(here) > 1 and len(there) > 1 and here[-1] == there[-1]:
                here, there = here[:-1], there[:-1]
            root, base = ".".join(here), ".".join(there)
            inside = [part for part in step.trained if is_in(part.module, root)]
            parts = [part for part in inside if not _is_constant(part.before)]
            if all((part.key, (base + part.module[len(root) :], part.label)) in alike for part in parts):
                yield _suspect("other-module-trained:copy", weight)


# An evaluation makes calls without grad mode in a row, or one after so many forwards and steps of the training. Others
# make the fake samples of a GAN, or condition a model on its own output.
_RARE, _EVALUATIONS = 8, 2
_DROPS = ("p", "dropout", "drop_prob", "dropout_p", "attention_dropout")


def _drops(module: nn.Module) -> bool:
    """Return whether a module of its own has dropout that is not 0."""
    return any(isinstance(value := vars(module).get(name), float) and 0 < value < 1 for name in _DROPS)


def _takes_statistics(module: nn.Module) -> bool:
    """Return whether a module in training mode changes running statistics. Those with other momenta recalibrate."""
    momentum = getattr(module, "momentum", None)
    return bool(getattr(module, "track_running_stats", False)) and momentum is not None and momentum < 1


def _in_evaluation_mode(step: Step) -> Iterator[Suspect]:
    """Yield the model, if it is trained in evaluation mode, and would behave otherwise in training mode."""
    called = (item.module for item in named_modules(step.model) if item.name in step.calls)
    has_trained = step.window.has_trained
    if not step.model.training and any(_drops(x) or (_takes_statistics(x) and has_trained) for x in called):
        yield Suspect("train-mode-wrong", "", None)


def _statistics_not_frozen(step: Step) -> Iterator[Suspect]:
    """Yield batch norms that no optimizer trains, and whose statistics are not frozen with their weights."""
    for name, _, module in named_modules(step.model):
        if not (module.training and name in step.calls and _takes_statistics(module)):
            continue
        weights = list(module._parameters.values())
        is_frozen = not any(x is None or x.requires_grad for x in weights)
        if is_frozen and held_by_optimizers().isdisjoint(map(id, weights)):
            yield Suspect("frozen-moved:statistics", name, None)


class Evaluations:
    """Calls of one model without grad mode and in training mode, and which of them evaluate it.

    Monte Carlo dropout, which calls with one tensor again and again, does not. Neither does the first of two passes
    of a contrastive loss, whose tensors come again in grad mode.
    """

    def __init__(self) -> None:
        self.progress = 0  # forwards in grad mode and steps since the latest call
        self._gaps: list[int] = []  # and those before each row of calls
        self._inputs: list[Callable[[], Tensor | None]] = []  # of the first and the latest call in a row
        self._places: list[Place | None] = []  # of the row, if it evaluates

    def called(self, model: nn.Module, inputs: Tensor | None) -> None:
        """Take a call without grad mode."""
        if self.progress:
            self._gaps.append(self.progress)
            self._inputs, self._places, self.progress = [], [], 0
        is_row = bool(self._inputs) and (inputs is None or inputs is not self._inputs[-1]())
        self._inputs = [*self._inputs[:1], (lambda: None) if inputs is None else weakref.ref(inputs)]
        is_rare = len(self._gaps) > _EVALUATIONS and min(self._gaps[1:]) >= _RARE
        if (is_row or is_rare) and not self._places:
            modules = (item.module for item in named_modules(model))
            if any(module.training and (_drops(module) or _takes_statistics(module)) for module in modules):
                self._places = [user_line()]

    def trained(self, inputs: Tensor | None = None) -> list[Place | None]:
        """Take a call in grad mode. Return the line of the evaluation that has ended with it, in a list, or []."""
        self.progress += 1
        places, self._places = self._places, []
        is_second_pass = inputs is not None and any(inputs is reference() for reference in self._inputs)
        return [] if is_second_pass else places


# In the order of docs/updates.md. Evaluations belong to the eleventh rule there, and the ranks have the twelfth.
_RULES: tuple[Callable[[Step], Iterator[Suspect]], ...] = (
    _no_gradient, _zero_gradient, _outside, _copy_rests, _not_stepped, _absorbed, _rounded_between_steps,
    _frozen_moved, _statistics_not_frozen, _tie_broken, _clips, _scaled, _divided_by_the_next_scale, _stale,
    _means_of_unequal_counts, _in_evaluation_mode,
)  # fmt: skip
