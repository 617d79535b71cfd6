"""The rules of an audit: what a step shows that a user did not mean.

Each yields Suspects. Suspicions counts how often in a row one shows: one step may have a fault by chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf, isclose
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.optimizer import Optimizer

from ..instrumentation.wrapped_names import named_modules
from ..report.finding import Place
from ..util.modules import is_in
from ..util.visible import suppressed, suppressing
from .samples import Key, WeightSample, is_full, number, plain, same_bits, sample
from .window import (
    Arrival,
    Backward,
    Call,
    Clip,
    Values,
    held_by_others,
    is_stale,
    is_taken_scaled,
    scale_of,
)  # fmt: skip

# A weight has a fault when so much of its update is lost, by elements and by magnitude.
_ABSORBED, _LOST = 0.75, 0.5
_GREW = 1.01  # a norm is larger beyond rounding
# Means over so unequal numbers of tokens do not add up to a mean. The last batch of an epoch may be smaller once.
_UNEQUAL = 1.5
_DROPS = ("p", "dropout", "drop_prob", "dropout_p", "attention_dropout")
# Audits in a row in which a weight must be suspected. A head that the loss leaves out, an expert without tokens, a
# branch behind a gain of 0 and a learning rate that warms up are no fault, and are over in fewer.
_NEEDED = {
    "no-gradient": 6,
    "zero-gradient": 6,
    "zero-lr": 5,
    "absorbed": 3,
    "not-in-optimizer": 3,
    "other-module-trained": 3,
    "train-mode-wrong": 3,
}
_NEEDED_ELSE = 2
# Share of a module's elements that need not have a fault of the module: its biases take any update.
_MISSING = {"absorbed": 0.25, "zero-gradient": 0.25}
_Whole = tuple[str, str, str | None]


class Suspect(NamedTuple):
    """A weight that may have a fault of this kind; `label` is None where a module is meant."""

    kind: str
    module: str
    label: str | None
    numbers: Mapping[str, float] = {}


@dataclass(eq=False)
class Step:
    """One audited step of `optimizer`.

    `foreign` are shape and format of those of its weights that the model lacks. `previous` are the weights in the step
    before, where that was audited too. The fields from `calls` on are filled in when the step is over.
    """

    model: nn.Module
    optimizer: Optimizer
    number: int
    weights: dict[Key, WeightSample]
    foreign: list[tuple[tuple[int, ...], torch.dtype]]
    clips: Sequence[Clip]
    previous: Mapping[Key, WeightSample]
    calls: Sequence[Call] = ()
    arrivals: Mapping[Key, Sequence[Arrival]] = field(default_factory=dict)
    has_trained: bool = False  # an audit has seen the model in training mode
    ends: Sequence[tuple[str, str]] = ()  # an output layer and an embedding that began with equal weights

    def of_optimizer(self) -> Iterable[WeightSample]:
        """Return the weights that the optimizer holds."""
        return (weight for weight in self.weights.values() if weight.group is not None)

    def trained(self) -> Iterable[WeightSample]:
        """Return the weights that the optimizer is to train."""
        return (weight for weight in self.of_optimizer() if weight.is_trained)

    @cached_property
    def scale(self) -> float | None:
        """The scale of a GradScaler in use."""
        return scale_of(
            [x for came in self.arrivals.values() for each in came for x in each.backward.factors]
        )


def suspects_of(step: Step) -> Iterator[Suspect]:
    """Yield what may be wrong with this step. A rule that raises is left out."""
    for rule in _RULES:
        try:
            yield from list(rule(step))
        except Exception:
            suppressed("a rule of the audit raised")


def _all(step: Step, kind: str, numbers: Mapping[str, float] | None = None) -> Iterator[Suspect]:
    for weight in step.trained():
        yield Suspect(kind, weight.module, weight.label, numbers or {})


def _no_gradient(step: Step) -> Iterator[Suspect]:
    """Yield weights without a gradient whose modules were called, unless their output is a leftover."""
    trained = list(step.trained())
    if not trained:  # and yet gradients come, or somebody has made them
        for weight in step.of_optimizer():
            if weight.is_meant:
                yield Suspect("no-gradient", weight.module, weight.label)
        return
    called = {call.module for call in step.calls}
    # Some were set to None on purpose, as those of a last layer that rests. All were not.
    cleared = {key for key, came in step.arrivals.items() if any(arrival.is_full for arrival in came)}
    without = [weight for weight in trained if weight.grad == "none"]
    if not (cleared and len(without) == len(trained)):
        without = [weight for weight in without if weight.module in called and weight.key not in cleared]
    names = {weight.module for weight in without}
    for above in {above for name in names for above in ancestors(name) if above}:
        if all(weight in without for weight in trained if is_in(weight.module, above)):
            names.add(above)
    leftover = _leftovers(step.calls, names)
    for weight in without:
        if not any(is_in(weight.module, name) for name in leftover):
            yield Suspect("no-gradient", weight.module, weight.label)


def _leftovers(calls: Sequence[Call], names: set[str]) -> set[str]:
    """Return the modules among these in modules that return several tensors, of which nobody takes one.

    So does a BERT with its pooler where a tagger asks for the tokens alone. What the outermost module returns goes to
    the user's code.
    """
    leftovers: set[str] = set()
    taken: set[Values] = set()
    for call in reversed(calls):
        if any(is_in(call.module, name) for name in names):
            continue
        around = {name for name in names if is_in(name, call.module)}
        if around and call.module and len(call.outputs) > 1 and not call.outputs <= taken:
            leftovers |= around
        taken |= call.inputs | (call.outputs if around else set())
    return leftovers


def _without_effect(step: Step) -> Iterator[Suspect]:
    """Yield weights with a rate of 0, with a gradient of 0, or whose update rounds away."""
    active = {weight.module for weight in step.trained() if weight.grad == "some"}
    for weight in step.trained():
        before = step.previous.get(weight.key)
        # A bias beside a weight with a gradient falls out of a difference of outputs, as in front of a batch norm.
        cancels = weight.label == "bias" and any(
            sibling.module == weight.module and sibling.label != "bias" and sibling.grad == "some"
            for sibling in step.trained()
        )
        if weight.lr == 0:
            if weight.grad == "some":
                yield Suspect("zero-lr", weight.module, weight.label, {"lr": 0.0})
        elif cancels:
            continue
        elif weight.grad == "zero":
            # A branch behind a factor of 0 gets its gradient once the factor has moved.
            is_late = before is not None and bool(before.lr) and all(clip.total < inf for clip in step.clips)
            if is_late and not _is_idle(step, weight, active):
                yield Suspect("zero-gradient", weight.module, weight.label)
        # A rate that rises still becomes what was meant.
        elif before is None or before.lr is None or weight.lr is None or weight.lr <= before.lr:
            yield from _absorbed(step, weight)


def _frozen_moved(step: Step) -> Iterator[Suspect]:
    """Yield frozen weights that the step moves."""
    for weight in step.of_optimizer():
        if not (weight.is_trained and weight.is_meant) and weight.has_moved:
            yield Suspect("frozen-moved", weight.module, weight.label)


def _scaled(step: Step) -> Iterator[Suspect]:
    """Yield all weights of a step that takes gradients with the loss scale."""
    if step.scale is not None and is_taken_scaled(step.optimizer):
        yield from _all(step, "not-unscaled", {"scale": step.scale})


def _absorbed(step: Step, weight: WeightSample) -> Iterator[Suspect]:
    values, after, update = weight.before, weight.after, _update(step, weight)
    if values is None or after is None or update is None or len(update) != len(after):
        return
    moving = (update != 0) & update.isfinite()
    count, stays = int(moving.sum()), moving & (after == values)
    share = int(stays.sum()) / max(1, count)
    if share >= _ABSORBED and update[stays].abs().sum() >= _LOST * update[moving].abs().sum():
        in_float32 = (values.float() != (values.double() - update).float()) & moving
        chances = (update.abs() / spacing(values)).clamp_max(1.0)
        numbers = {
            "absorbed": share,
            "float32": int(in_float32.sum()) / count,
            "stochastic": float(chances[moving].mean()),
        }
        yield Suspect("absorbed", weight.module, weight.label, numbers)


def _update(step: Step, weight: WeightSample) -> Tensor | None:
    """Return what a step of SGD, Adam or AdamW subtracted from a 16-bit weight, in float64 and without weight decay.

    Other optimizers may round stochastically, or keep what was lost.
    """
    x, kind = weight.tensor(), type(step.optimizer)
    if x is None or weight.group is None or x.dtype not in (torch.bfloat16, torch.float16):
        return None
    group, state = step.optimizer.param_groups[weight.group], step.optimizer.state.get(x, {})
    parts = {
        key: sample(values).double()
        for key, part in state.items()
        if isinstance(part, Tensor) and part.shape == x.shape and (values := plain(part)) is not None
    }
    lr = weight.lr or 0.0
    if kind is torch.optim.SGD and weight.gradient is not None:
        return lr * parts.get("momentum_buffer", weight.gradient.double())
    if kind not in (torch.optim.Adam, torch.optim.AdamW) or not {"exp_avg", "exp_avg_sq"} <= parts.keys():
        return None
    count = number(state.get("step")) or 1.0
    first, second = (1 - float(beta) ** count for beta in group["betas"])
    update: Tensor = lr * (parts["exp_avg"] / first) / ((parts["exp_avg_sq"] / second).sqrt() + group["eps"])
    return update


def spacing(x: Tensor) -> Tensor:
    """Return the distance from each element to the next larger number of its format, in float64."""
    info = torch.finfo(x.dtype)
    _, exponent = torch.frexp(x.abs().double().clamp_min(info.smallest_normal))
    return torch.ldexp(torch.full_like(x, info.eps, dtype=torch.float64), exponent - 1)


def _is_idle(step: Step, weight: WeightSample, active: set[str]) -> bool:
    """Return whether the module may be an expert without tokens: nobody called it, or others got the same input."""
    calls = [call for call in step.calls if is_in(weight.module, call.module) and call.module]
    if not any(call.module == weight.module for call in calls):
        return bool(step.calls)
    return any(call.is_empty for call in calls) or any(
        rival.inputs & call.inputs and any(is_in(name, rival.module) for name in active)
        for call in calls
        for rival in step.calls
        if not is_in(weight.module, rival.module) and not is_in(rival.module, call.module)
    )


def _outside(step: Step) -> Iterator[Suspect]:
    """Yield weights that get gradients, and that neither an optimizer has nor anything moves."""
    missing = [
        weight
        for weight in step.weights.values()
        if weight.is_trained
        and weight.is_meant
        and weight.group is None
        and weight.before is not None
        and (before := step.previous.get(weight.key)) is not None
        and before.before is not None
        and same_bits(before.before, weight.before)
    ]
    # The search for optimizers takes 10 ms for a million objects.
    others = held_by_others(step.optimizer) if missing else frozenset()
    missing = [weight for weight in missing if id(weight.tensor()) not in others]
    # The optimizer has others of the same shapes: those of a copy, or what these were before they were replaced. In
    # another format these are masters of 16-bit weights, whose updates may round away for a while.
    shapes = Counter(weight.shape for weight in missing)
    has_copy = shapes <= Counter(shape for shape, _ in step.foreign)
    formats = {dtype for _, dtype in step.foreign}
    for weight in missing:
        if has_copy and weight.before is not None and weight.before.dtype in formats:
            yield Suspect("other-module-trained", weight.module, weight.label)
        elif not has_copy and weight.grad == "some":
            yield Suspect("not-in-optimizer", weight.module, weight.label)


def _stale(step: Step) -> Iterator[Suspect]:
    """Yield weights whose gradients of earlier steps were never set to zero."""
    for weight in step.trained() if step.previous else ():
        arrivals = step.arrivals.get(weight.key)
        if arrivals and is_stale(arrivals):
            yield Suspect("missing-zero-grad", weight.module, weight.label)


def _means_of_unequal_counts(step: Step) -> Iterator[Suspect]:
    """Yield weights that got several backwards of one line, whose losses are means over unequal counts.

    Each loss is divided by the number of backwards. A loop over tasks divides by nothing, and means what it adds.
    """
    for arrivals in step.arrivals.values():
        lines: dict[Place | None, dict[int, Backward]] = {}
        is_emptied = not all(arrival.was_full for arrival in arrivals[1:])  # between two backwards
        for backward, _, _ in () if is_emptied else arrivals:
            lines.setdefault(backward.place, {})[backward.batch] = backward
        for backwards in (list(line.values()) for line in lines.values()):
            counts = [backward.elements or 0.0 for backward in backwards]
            are_divided = all(
                any(factor != 1 and factor != step.scale for factor in backward.factors)
                for backward in backwards
            )
            # A function that steps with any optimizer: one backward was for another model's.
            is_one_step = len({backward.num_steps for backward in backwards}) == 1
            if len(counts) > 1 and are_divided and is_one_step and max(counts) > _UNEQUAL * min(counts) > 0:
                numbers = {"backwards": len(counts), "least": min(counts), "most": max(counts)}
                yield from _all(step, "accumulation", numbers)
                return


def _clips(step: Step) -> Iterator[Suspect]:
    """Yield weights that a clip has no effect on, whose gradients it has made 0, or lost in the optimizer's eps."""
    with_gradient = [weight for weight in step.trained() if weight.grad != "none"]
    group = step.optimizer.param_groups[0]
    eps = (number(group.get("eps")) or 0.0) if "betas" in group else 0.0
    for place, clip in enumerate(step.clips):
        clipped = [weight for weight in with_gradient if id(weight.tensor()) in clip.ids or not clip.ids]
        gradients = [weight.gradient.double().abs() for weight in clipped if weight.gradient is not None]
        size = float(torch.cat(gradients).median()) if gradients else 0.0
        is_at_work = clip.total > clip.max_norm > 0
        later = [each for each in step.clips[place + 1 :] if (each.ids, each.place) == (clip.ids, clip.place)]
        kind, norm = "", clip.total
        if any(each.backwards > clip.backwards for each in later):
            kind = "clipping:each-backward" if is_at_work else ""
        elif clip.at_step > max(clip.max_norm, clip.norm) * _GREW:
            kind, norm = "clipping", clip.at_step
        elif step.scale not in (None, 1) and isclose(clip.norm, clip.at_step * step.scale, rel_tol=0.01):
            yield from _all(step, "not-unscaled", {"scale": step.scale})
        elif is_at_work and clip.total == inf and all(weight.grad == "zero" for weight in clipped):
            kind = "clipping:to-zero" if gradients else ""
        elif is_at_work and 0 < size < eps <= size * clip.total / clip.max_norm:
            kind = "clipping:below-eps"
        for weight in clipped if kind else ():
            yield Suspect(kind, weight.module, weight.label, {"norm": norm, "max_norm": clip.max_norm})


def drops(module: nn.Module) -> bool:
    """Return whether a module of its own has dropout that is not 0."""
    values = (vars(module).get(name) for name in _DROPS)
    return any(isinstance(value, float) and 0 < value < 1 for value in values)


def takes_statistics(module: nn.Module) -> bool:
    """Return whether a module in training mode changes running statistics. Those with other momenta recalibrate."""
    if not isinstance(module, _NormBase) or not module.track_running_stats:
        return False
    return module.momentum is not None and module.momentum < 1


def depends_on_mode(model: nn.Module) -> bool:
    """Return whether some module in training mode computes something else than in evaluation mode."""
    modules = (item.module for item in named_modules(model))
    return any(module.training and (drops(module) or takes_statistics(module)) for module in modules)


def _train_mode(step: Step) -> Iterator[Suspect]:
    """Yield the model, if it is trained in evaluation mode."""
    called = {call.module for call in step.calls}
    for name, _, module in named_modules(step.model) if not step.model.training else ():
        if name in called and (drops(module) or (takes_statistics(module) and step.has_trained)):
            yield Suspect("train-mode-wrong", "", None)
            return


def _counting(step: Step) -> Iterator[Suspect]:
    """Yield batch norms that no optimizer trains, and whose statistics are not frozen with their weights."""
    called = {call.module for call in step.calls}
    for name, _, module in named_modules(step.model):
        weights = list(module._parameters.values())
        if module.training and name in called and takes_statistics(module):
            is_frozen = not any(x is None or x.requires_grad for x in weights)
            optimized = {id(weight.tensor()) for weight in step.of_optimizer()} | held_by_others(
                step.optimizer
            )
            if is_frozen and not any(id(x) in optimized for x in weights):
                yield Suspect("frozen-moved:statistics", name, None)


def ends_of(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield each output layer and embedding that are meant to be one weight, and are two.

    They are equal, as copies are, or the model's configuration says that they are tied.
    """
    tables: dict[str, nn.Module] = {}
    outputs: dict[str, nn.Module] = {}
    told: list[Any] = []
    for name, _, module in named_modules(model):
        whole: Any = module
        if getattr(getattr(module, "config", None), "tie_word_embeddings", False) is True:
            # Models without a text part inherit both methods from transformers, and they raise.
            with suppressing("the embeddings of a model could not be told"):
                told.append((whole.get_output_embeddings(), whole.get_input_embeddings()))
        weight = module._parameters.get("weight") if isinstance(module, nn.Embedding | nn.Linear) else None
        if weight is not None and weight.requires_grad:
            (tables if isinstance(module, nn.Embedding) else outputs)[name] = module
    for name, output in outputs.items():
        for end, table in tables.items():
            ours, theirs = output._parameters["weight"], table._parameters["weight"]
            if ours is None or theirs is None or ours is theirs or ours.shape != theirs.shape:
                continue
            if any(pair[0] is output and pair[1] is table for pair in told) or _is_copy(ours, theirs):
                yield name, end


def _is_copy(x: Tensor, copy: Tensor) -> bool:
    values, table = plain(x), plain(copy)
    if values is None or table is None or values.shape != table.shape or values.device != table.device:
        return False
    is_apart = values.data_ptr() != table.data_ptr() and values.dtype == table.dtype
    is_alike = is_apart and is_full(x) and same_bits(sample(values), sample(table))
    return is_alike and torch.equal(values, table)


def _parted(step: Step) -> Iterator[Suspect]:
    """Yield the copies of once tied weights that the steps have made different."""
    for name, end in step.ends:
        output, table = (step.weights.get((module, "weight")) for module in (name, end))
        if output is None or table is None or output.after is None or table.after is None:
            continue
        if not same_bits(output.after, table.after):
            yield Suspect("tie-broken", name, "weight")


_Rule = Callable[[Step], Iterator[Suspect]]
_RULES: tuple[_Rule, ...] = (
    _no_gradient, _without_effect, _frozen_moved, _stale, _means_of_unequal_counts, _clips, _scaled, _train_mode,
    _parted, _outside, _counting,
)  # fmt: skip


class Suspicions:
    """Counts of how often in a row each weight of one optimizer was suspected of each kind of fault."""

    def __init__(self) -> None:
        self._in_a_row: dict[_Whole, int] = {}
        self._certain: set[_Whole] = set()

    @property
    def is_open(self) -> bool:
        """Return whether a suspicion is neither certain nor gone."""
        return any(key not in self._certain for key in self._in_a_row)

    def keys(self, kind: str) -> set[Key]:
        """Return the weights that were suspected of this kind at the latest audit."""
        return {
            (module, label) for name, module, label in self._in_a_row if name == kind and label is not None
        }

    def add(
        self, suspects: Iterable[Suspect], weights: Iterable[WeightSample]
    ) -> Iterator[tuple[Suspect, int]]:
        """Take the suspects of one audit, and yield the faults that are certain by now, each once: see `gathered`."""
        new = {suspect[:3]: suspect for suspect in suspects}
        self._in_a_row = {key: self._in_a_row.get(key, 0) + 1 for key in new}
        ripe = [
            suspect
            for key, suspect in new.items()
            if key not in self._certain and self._in_a_row[key] >= _NEEDED.get(suspect.kind, _NEEDED_ELSE)
        ]
        self._certain |= {suspect[:3] for suspect in ripe}
        sizes = {weight.key: weight.size for weight in weights}
        trained = {weight.key: weight.size for weight in weights if weight.is_trained}
        for kind in dict.fromkeys(suspect.kind for suspect in ripe):
            alike = [suspect for suspect in ripe if suspect.kind == kind]
            are_trained = all((suspect.module, suspect.label) in trained for suspect in alike)
            yield from gathered(alike, trained if are_trained else sizes)


def ancestors(module: str) -> Iterator[str]:
    """Yield the name of the module and of all that it is in, up to the root."""
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""


def gathered(ripe: Sequence[Suspect], weights: Mapping[Key, int]) -> Iterator[tuple[Suspect, int]]:
    """Yield one fault for each largest module whose weights have it: all of these, or nearly all of their elements.

    The number is that of the trained weights that are meant.
    """
    hits = {(suspect.module, suspect.label) for suspect in ripe}
    named: set[tuple[str, str | None]] = set()
    for suspect in ripe:
        module, label, count = suspect.module, suspect.label, 1
        for above in ancestors(module) if label is not None else ():
            inside = {key: size for key, size in weights.items() if is_in(key[0], above)}
            missing = sum(size for key, size in inside.items() if key not in hits)
            if inside and missing <= _MISSING.get(suspect.kind, 0.0) * sum(inside.values()):
                module, label, count = above, None, len(inside)
        # A module of one weight is named with it.
        if label is None and count == 1 and suspect.label is not None:
            module, label = suspect.module, suspect.label
        if (module, label) not in named:
            named.add((module, label))
            yield Suspect(suspect.kind, module, label, suspect.numbers), count
