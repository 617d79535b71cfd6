"""The rules of an audit: what a step shows that a user did not mean.

Each yields Suspects. `suspicions.py` says how often in a row one must show until it is a fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isclose, isnan
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim.optimizer import Optimizer

from ..instrumentation.wrapped_names import named_modules
from ..util.modules import is_in
from ..util.place import Place
from ..util.visible import suppressed
from .samples import Key, StepSamples, WeightSample, is_full, number, plain, same_bits, sample
from .suspicions import Suspect, ancestors
from .window import Backward, Call, Clip, Probe, Values

# A part without gradients may be a head that this loss leaves out, unless it is this much of the model.
_LARGE = 0.5
# A weight has a fault when so much of its update is lost, by elements and by magnitude.
_ABSORBED, _LOST = 0.75, 0.5
_GREW = 1.01  # a norm is larger beyond rounding
# Means over so unequal numbers of tokens do not add up to a mean. The last batch of an epoch may be smaller once.
_UNEQUAL = 1.5
_MOMENTS = frozenset({"step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"})
# Classes that treat each element alone, with all that their state may have.
_KNOWN: dict[type, frozenset[str]] = {
    torch.optim.SGD: frozenset({"momentum_buffer"}),
    torch.optim.Adam: _MOMENTS,
    torch.optim.AdamW: _MOMENTS,
}
_DROPS = ("p", "dropout", "drop_prob", "dropout_p", "attention_dropout")


@dataclass(slots=True, eq=False)
class StepView:
    """One audited step of `optimizer`, after it was made."""

    model: nn.Module
    optimizer: Optimizer
    samples: StepSamples
    calls: Sequence[Call]
    probes: Sequence[Probe]  # of the optimizer's weights
    clips: Sequence[Clip]
    others: Callable[[], frozenset[int]]  # ids of weights in other optimizers
    is_first: bool  # the first optimizer of the model
    previous: StepSamples | None  # the step before, where it was audited too
    scale: float | None  # of a GradScaler in use
    is_scaled: bool  # the gradients of the step still have it
    modes: Mapping[str, bool]  # modules, and whether an audit has seen them in training mode
    ends: Sequence[tuple[str, str]]  # an output layer and an embedding that began with equal weights

    def trained(self) -> Iterable[WeightSample]:
        """Return the weights that the optimizer is to train."""
        return (weight for weight in self.samples.of_optimizer() if weight.is_trained)

    def before(self, key: Key) -> WeightSample | None:
        """Return a weight in the step before, None where that was not audited."""
        return None if self.previous is None else self.previous.by_key.get(key)


def suspects_of(view: StepView) -> Iterator[Suspect]:
    """Yield what may be wrong with this step. A rule that raises is left out."""
    for rule in (*_RULES, *(_RULES_OF_MODEL if view.is_first else ())):
        try:
            yield from list(rule(view))
        except Exception:
            suppressed("a rule of the audit raised")


def _all(view: StepView, kind: str, numbers: Mapping[str, float] | None = None) -> Iterator[Suspect]:
    for weight in view.trained():
        yield Suspect(kind, weight.module, weight.label, numbers or {})


def _no_gradient(view: StepView) -> Iterator[Suspect]:
    trained = list(view.trained())
    if not trained:  # and yet gradients come, or somebody has made them
        for weight in view.samples.of_optimizer():
            if weight.is_meant:
                yield Suspect("no-gradient", weight.module, weight.label)
        return
    called = {call.module for call in view.calls}
    # Some were set to None on purpose, as those of a last layer that rests. All were not.
    cleared = {probe.key for probe in view.probes if any(arrival.is_full for arrival in probe.arrivals)}
    without = [weight for weight in trained if weight.grad == "none"]
    if not (cleared and len(without) == len(trained)):
        without = [weight for weight in without if weight.module in called and weight.key not in cleared]
    if not without:
        return
    names = {weight.module for weight in without}
    for above in {above for name in names for above in ancestors(name) if above}:
        if all(weight in without for weight in trained if is_in(weight.module, above)):
            names.add(above)
    share = sum(weight.size for weight in without) / sum(weight.size for weight in trained)
    if share >= _LARGE or _is_taken(view.calls, names) or _is_used_inside(view.calls, names):
        for weight in without:
            yield Suspect("no-gradient", weight.module, weight.label)


def _is_taken(calls: Sequence[Call], names: set[str]) -> bool:
    """Return whether a later call of another module takes the very tensors that these gave.

    Where nothing around them is called, as in a loop that calls the parts of a model, it also does so with tensors that
    no module was called with or gave: code between the modules has made them, such as an argmax.
    """
    made: set[Values] = set()
    known: set[Values] = set()
    has_begun, is_alone = False, not any(_is_around(call.module, names) for call in calls)
    for call in calls:
        if any(is_in(call.module, name) for name in names):
            has_begun = True
            made |= call.outputs
            known |= call.inputs
        elif not _is_around(call.module, names):
            if has_begun and (made & call.inputs or (is_alone and not call.inputs <= known)):
                return True
            known |= call.inputs | call.outputs
    return False


def _is_around(module: str, names: set[str]) -> bool:
    return any(is_in(name, module) and name != module for name in names)


def _is_used_inside(calls: Sequence[Call], names: set[str]) -> bool:
    """Return whether code around these modules takes their outputs, and all that it gives is used.

    A call around them that gives several tensors may return theirs for somebody who does not ask for them: the pooler
    of a tagger, a head that the loss leaves out. That is no fault unless each of those tensors goes on.
    """
    taken: set[Values] = set()
    is_around = False
    for call in reversed(calls):
        if not any(is_in(call.module, name) for name in names):
            if _is_around(call.module, names):
                is_around = True
                if len(call.outputs) > 1 and not call.outputs <= taken:
                    return False
                taken |= call.outputs
            taken |= call.inputs
    return is_around


def _without_effect(view: StepView) -> Iterator[Suspect]:
    """Yield weights with a rate of 0, with a gradient of 0, or whose update rounds away."""
    for weight in view.trained():
        before = view.before(weight.key)
        if weight.lr == 0:
            if weight.grad == "some":
                yield Suspect("zero-lr", weight.module, weight.label, {"lr": 0.0})
        elif weight.grad == "zero":
            # A branch behind a factor of 0 gets its gradient once the factor has moved.
            is_late = before is not None and bool(before.lr) and all(clip.total < inf for clip in view.clips)
            if is_late and not _is_idle(view, weight) and not _cancels(view, weight):
                yield Suspect("zero-gradient", weight.module, weight.label)
        # A rate that rises still becomes what was meant.
        elif before is None or before.lr is None or weight.lr is None or weight.lr <= before.lr:
            yield from _absorbed(view, weight)


def _frozen_moved(view: StepView) -> Iterator[Suspect]:
    """Yield frozen weights that the step moves."""
    for weight in view.samples.of_optimizer():
        if not (weight.is_trained and weight.is_meant) and weight.has_moved:
            yield Suspect("frozen-moved", weight.module, weight.label)


def _scaled(view: StepView) -> Iterator[Suspect]:
    """Yield all weights of a step that takes gradients with the loss scale."""
    if view.is_scaled and view.scale is not None:
        yield from _all(view, "not-unscaled", {"scale": view.scale})


def _absorbed(view: StepView, weight: WeightSample) -> Iterator[Suspect]:
    values, after = weight.before, weight.after
    if values is None or after is None or values.dtype not in (torch.bfloat16, torch.float16):
        return
    meant = expected(view.optimizer, weight, view.samples)
    if meant is None or len(meant) != len(after):
        return
    update = meant - values.double()
    moving = (update != 0) & update.isfinite()
    count = int(moving.sum())
    if not count:
        return
    stays = moving & (after == values)
    lost = float(update[stays].abs().sum() / update[moving].abs().sum())
    share = int(stays.sum()) / count
    if share >= _ABSORBED and lost >= _LOST:
        chances = (update.abs() / spacing(values)).clamp_max(1.0)
        in_float32 = (values.float() != meant.float()) & moving
        numbers = {
            "absorbed": share,
            "float32": int(in_float32.sum()) / count,
            "stochastic": float(chances[moving].mean()),
            "lost": lost,
        }
        yield Suspect("absorbed", weight.module, weight.label, numbers)


def expected(optimizer: Optimizer, weight: WeightSample, samples: StepSamples) -> Tensor | None:
    """Return the values in float64 that the optimizer's rule gives for a weight, None where it does not apply."""
    before, gradient, known = weight.before, weight.gradient, _KNOWN.get(type(optimizer))
    group = samples.groups[weight.group or 0]
    if known is None or before is None or gradient is None or len(gradient) != len(before):
        return None
    has_unknown = any(isinstance(value, float) and isnan(value) for value in weight.state.values())
    if samples.is_repeated or has_unknown or not weight.state.keys() <= known or group.get("differentiable"):
        return None
    x = before.to(torch.float64, copy=True)
    make: Any = type(optimizer)
    twin: Optimizer = make([x])
    twin.param_groups[0].update({**group, "foreach": False, "fused": False, "capturable": False})
    if weight.state:
        twin.state[x] = {
            key: value.double() if isinstance(value, Tensor) else torch.tensor(value)
            for key, value in weight.state.items()
        }
    x.grad = gradient.double()
    # Without PyTorch's hooks around it, of which some are the user's.
    step = type(optimizer).step
    with torch.no_grad():
        getattr(step, "__wrapped__", step)(twin)
    return x


def spacing(x: Tensor) -> Tensor:
    """Return the distance from each element to the next larger number of its format, in float64."""
    info = torch.finfo(x.dtype)
    _, exponent = torch.frexp(x.abs().double().clamp_min(info.smallest_normal))
    return torch.ldexp(torch.full_like(x, info.eps, dtype=torch.float64), exponent - 1)


def _cancels(view: StepView, weight: WeightSample) -> bool:
    """Return whether it is a bias beside a weight with a gradient: in a difference of outputs it falls out."""
    beside = view.samples.of_optimizer() if weight.label == "bias" else ()
    return any(sibling.module == weight.module and sibling.grad == "some" for sibling in beside)


def _is_idle(view: StepView, weight: WeightSample) -> bool:
    """Return whether the module may be an expert without tokens: nobody called it, or others got the same input."""
    calls = [call for call in view.calls if is_in(weight.module, call.module) and call.module]
    if not any(call.module == weight.module for call in calls):
        return bool(view.calls)
    if any(call.is_empty for call in calls):
        return True
    active = {sibling.module for sibling in view.trained() if sibling.grad == "some"}
    return any(
        rival.inputs & call.inputs and any(is_in(name, rival.module) for name in active)
        for call in calls
        for rival in view.calls
        if not is_in(weight.module, rival.module) and not is_in(rival.module, call.module)
    )


def _outside(view: StepView) -> Iterator[Suspect]:
    """Yield weights that get gradients, and that neither an optimizer has nor anything moves."""
    missing = [
        weight
        for weight in view.samples.by_key.values()
        if weight.is_trained
        and weight.is_meant
        and weight.group is None
        and weight.before is not None
        and (before := view.before(weight.key)) is not None
        and before.before is not None
        and same_bits(before.before, weight.before)
    ]
    # The search for optimizers takes 10 ms for a million objects.
    others = view.others() if missing else frozenset()
    missing = [weight for weight in missing if id(weight.tensor()) not in others]
    # The optimizer has others of the same shapes: those of a copy, or what these were before they were replaced. In
    # another format these are masters of 16-bit weights, whose updates may round away for a while.
    shapes = Counter(weight.shape for weight in missing)
    has_copy = shapes <= Counter(shape for shape, _ in view.samples.foreign)
    formats = {dtype for _, dtype in view.samples.foreign}
    for weight in missing:
        if has_copy and weight.before is not None and weight.before.dtype in formats:
            yield Suspect("other-module-trained", weight.module, weight.label)
        elif not has_copy and weight.grad == "some":
            yield Suspect("not-in-optimizer", weight.module, weight.label)


def _stale(view: StepView) -> Iterator[Suspect]:
    """Yield weights whose gradients of earlier steps were never set to zero."""
    if view.previous is None:
        return
    probes = [probe for probe in view.probes if probe.arrivals]
    stale = [probe for probe in probes if probe.is_stale]
    if probes and len(stale) == len(probes):
        yield from _all(view, "missing-zero-grad")
    else:
        for probe in stale:
            yield Suspect("missing-zero-grad", *probe.key)


def _means_of_unequal_counts(view: StepView) -> Iterator[Suspect]:
    """Yield weights that got several backwards of one line, whose losses are means over unequal counts.

    Each loss is divided by the number of backwards. A loop over tasks divides by nothing, and means what it adds.
    """
    for probe in view.probes:
        lines: dict[Place | None, dict[int, Backward]] = {}
        for backward, _, _ in () if probe.resets else probe.arrivals:
            lines.setdefault(backward.place, {})[backward.batch] = backward
        for backwards in (list(line.values()) for line in lines.values()):
            counts = [backward.elements or 0.0 for backward in backwards]
            are_divided = all(
                any(factor != 1 and factor != view.scale for factor in backward.factors)
                for backward in backwards
            )
            # A function that steps with any optimizer: one backward was for another model's.
            is_one_step = len({backward.num_steps for backward in backwards}) == 1
            if len(counts) > 1 and are_divided and is_one_step and max(counts) > _UNEQUAL * min(counts) > 0:
                numbers = {"backwards": len(counts), "least": min(counts), "most": max(counts)}
                yield from _all(view, "accumulation", numbers)
                return


def _clips(view: StepView) -> Iterator[Suspect]:
    for clip in view.clips:
        yield from _clipped(view, clip)


def _clipped(view: StepView, clip: Clip) -> Iterator[Suspect]:
    """Yield weights that a clip has no effect on, whose gradients it has made 0, or lost in the optimizer's eps."""
    with_gradient = [weight for weight in view.trained() if weight.grad != "none"]
    ids = {id(x) for reference in clip.weights if (x := reference()) is not None}
    clipped = [weight for weight in with_gradient if id(weight.tensor()) in ids or not ids]
    if clip.at_step > max(clip.max_norm, clip.norm) * _GREW:
        for weight in clipped:
            numbers = {"norm": clip.at_step, "max_norm": clip.max_norm}
            yield Suspect("clipping", weight.module, weight.label, numbers)
    elif (
        view.scale is not None
        and view.scale > 1
        and isclose(clip.norm, clip.at_step * view.scale, rel_tol=0.01)
    ):
        yield from _all(view, "not-unscaled", {"scale": view.scale})
    group = view.samples.groups[0]
    eps = (number(group.get("eps")) or 0.0) if "betas" in group else 0.0
    gradients = [weight.gradient.double().abs() for weight in clipped if weight.gradient is not None]
    if clip.total > clip.max_norm > 0 and gradients:
        kind, size = "", float(torch.cat(gradients).median())
        if clip.total == inf and all(weight.grad == "zero" for weight in clipped):
            kind = "clipping:to-zero"
        elif 0 < size < eps <= size * clip.total / clip.max_norm:
            kind = "clipping:below-eps"
        for weight in clipped if kind else ():
            numbers = {"norm": clip.total, "max_norm": clip.max_norm}
            yield Suspect(kind, weight.module, weight.label, numbers)


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


def _train_mode(view: StepView) -> Iterator[Suspect]:
    """Yield the model, or parts that were in training mode before, that are trained in evaluation mode."""
    called = {call.module for call in view.calls}
    moving = [weight.module for weight in view.trained() if weight.grad == "some"]
    for name, _, module in named_modules(view.model):
        if module.training or name not in called:
            continue
        parent = name.rpartition(".")[0]
        if not view.model.training:
            if drops(module) or (takes_statistics(module) and view.modes.get("")):
                yield Suspect("train-mode-wrong", "", None)
                return
        elif view.modes.get(name) and drops(module) and any(is_in(moved, parent) for moved in moving):
            yield Suspect("train-mode-wrong", parent, None)


def _counting(view: StepView) -> Iterator[Suspect]:
    """Yield batch norms that no optimizer trains, and whose statistics are not frozen with their weights."""
    called = {call.module for call in view.calls}
    for name, _, module in named_modules(view.model):
        weights = list(module._parameters.values())
        if module.training and name in called and takes_statistics(module):
            is_frozen = not any(x is None or x.requires_grad for x in weights)
            optimized = {id(weight.tensor()) for weight in view.samples.of_optimizer()} | view.others()
            if is_frozen and not any(id(x) in optimized for x in weights):
                yield Suspect("frozen-moved:statistics", name, None)


def _ties(view: StepView) -> Iterator[Suspect]:
    """Yield the output weight of a model whose configuration says that it is that of the embedding."""
    model = view.model
    for _, _, module in named_modules(model):
        is_said = getattr(getattr(module, "config", None), "tie_word_embeddings", False) is True
        if not is_said or not hasattr(module, "get_output_embeddings"):
            continue
        whole: Any = module
        try:
            ends = whole.get_output_embeddings(), whole.get_input_embeddings()
        except Exception:  # models without a text part inherit both methods from transformers, and they raise
            suppressed("the embeddings of a model could not be told")
            continue
        output, table = (getattr(end, "_parameters", {}).get("weight") for end in ends)
        if output is not None and table is not None and output is not table and output.requires_grad:
            names = [item.name for item in named_modules(model) if item.module is ends[0]]
            if names and output.shape == table.shape:
                yield Suspect("tie-broken", names[0], "weight")
        return


def equal_ends(model: nn.Module) -> list[tuple[str, str]]:
    """Return an output layer and an embedding with equal weights apart: copies of one that were tied, as it seems."""
    tables: list[tuple[str, Tensor]] = []
    pairs: list[tuple[str, str]] = []
    for name, _, module in named_modules(model):
        weight = module._parameters.get("weight") if isinstance(module, nn.Embedding | nn.Linear) else None
        if weight is None or not weight.requires_grad:
            continue
        if isinstance(module, nn.Embedding):
            tables.append((name, weight))
        elif is_full(weight):
            pairs += [(name, end) for end, table in tables if _is_copy(weight, table)]
    return pairs


def _is_copy(x: Tensor, copy: Tensor) -> bool:
    values, table = plain(x), plain(copy)
    if values is None or table is None or values.shape != table.shape or values.device != table.device:
        return False
    is_apart = values.data_ptr() != table.data_ptr() and values.dtype == table.dtype
    return is_apart and same_bits(sample(values), sample(table)) and torch.equal(values, table)


def _parted(view: StepView) -> Iterator[Suspect]:
    """Yield the copies of once tied weights that the steps have made different."""
    for name, end in view.ends:
        output, table = (view.samples.by_key.get((module, "weight")) for module in (name, end))
        if output is None or table is None or output.after is None or table.after is None:
            continue
        if not torch.equal(output.after, table.after):
            yield Suspect("tie-broken", name, "weight")


_Rule = Callable[[StepView], Iterator[Suspect]]
_RULES: tuple[_Rule, ...] = (
    _no_gradient, _without_effect, _frozen_moved, _stale, _means_of_unequal_counts, _clips, _scaled, _train_mode,
    _parted,
)  # fmt: skip
_RULES_OF_MODEL: tuple[_Rule, ...] = (_outside, _counting, _ties)  # of its first optimizer alone
