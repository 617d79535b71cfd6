"""`nanwatch.recipe`: the cheapest number formats of a model's linear layers whose loss stays within a budget."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...instrumentation.wrapped_names import unwrapped
from ...numerics.block_formats import BLOCKS_BY_NAME
from ...numerics.readable import dtype_name
from ...precision.emulation import BFLOAT16, TARGETS, Rounding
from ...util.progress import Tell, silent
from ...util.visible import close_names, first_few
from .forwards import ALL, Forwards, LossFunction, Outcome
from .result import TORCHAO, TRANSFORMER_ENGINE, LayerRecipe, Recipe, Trial
from .search import Formats, beside, cheapest, path

# Runs beside two for each format of each layer.
_SPARE = 20


def recipe(
    model: nn.Module,
    batch: Any,
    to: Sequence[str] = ("mxfp8", "nvfp4", BFLOAT16),
    *,
    loss_budget: float | str = 0.005,
    train: bool = False,
    hadamard: int = 0,
    stochastic: bool = False,
    loss: LossFunction | None = None,
    journal: str | os.PathLike[str] | None = None,
    tell: Tell = silent,
) -> Recipe:
    """Find the cheapest number format for each linear layer with which a model's loss stays within a budget.

    Args:
        model: holds the nn.Linear layers. It stays as it is: training mode, parameters, gradients, random numbers.
        batch: its arguments: a dict by name, a tuple by position, or the only one.
        to: the formats to try: bfloat16, and the block formats, such as mxfp8, mxfp4, nvfp4, float8_rowwise.
        loss_budget: how far the loss may move in either direction, as a share such as 0.005 or "0.5%".
        train: round the operands of the two backward matmuls too, and tell how far the gradients move.
        hadamard: rotate blocks of 16 or 32 elements of both operands before they are rounded to a block format.
        stochastic: round gradients up or down by chance. Needs `train`.
        loss: a function of the output. By default the output's `loss`, its item "loss", itself or its first part.
        journal: a file to which each measurement is appended. A call that was interrupted goes on from there.
        tell: called with the progress.

    Layers are ordered by the divergence of the predictions from those of the model as it is where the loss is a
    cross-entropy (Kullback-Leibler) or a squared error (mean square), which has the unit of the loss and far less noise
    than its change; by the size of the change for another loss. With each change comes its standard error over the
    tokens of the batch. Both the change and the divergence have to be within the budget.

    A format costs the bits of its elements, relative to bfloat16, for each multiplication of the layer. Formats that
    are no cheaper than the layer's own dtype are not tried. At most two runs for each format of each layer are made,
    and 20 more: each layer alone in each format, all layers in each format, a first search, each layer beside the
    formats that it has found for the others, and the search again. A format whose blocks do not divide a layer's
    weight is not tried on it, since kernels do not fill blocks up; a remark names the layer.

    Raises ValueError where an argument is wrong, the model has no nn.Linear, the batch gives no loss, or the loss of
    the model as it is is not finite.

    Examples:
        >>> import nanwatch, torch
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
        >>> x = torch.linspace(-1, 1, 256).reshape(8, 32)
        >>> found = nanwatch.recipe(model, x, ["mxfp8"], loss=lambda y: (y - 3).square().mean(), loss_budget="5%")
        >>> found.formats
        {'0': 'mxfp8', '2': 'mxfp8'}
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model should be a torch.nn.Module, got {type(model).__name__}")
    targets, budget = _targets(to), _share(loss_budget)
    rounding = Rounding(backward=train, hadamard=hadamard, stochastic=stochastic)
    forwards = Forwards(
        unwrapped(model), batch, loss, rounding, None if journal is None else Path(journal), tell
    )
    with forwards.same_start():
        return _Search(forwards, targets, budget).find()


class _Search:
    """Measures layers, searches for their formats and gathers the result."""

    def __init__(self, forwards: Forwards, targets: Sequence[str], budget: float) -> None:
        self._forwards = forwards
        self._targets = targets
        self._budget = budget
        self._base, self._floor = forwards.as_it_is()
        if not isfinite(self._base.loss):
            raise ValueError(
                f"the loss of the model as it is is {self._base.loss}; nanwatch.watch(model) finds where that begins"
            )
        called = {name: number for name, number in forwards.multiplications.items() if number}
        if not called:
            raise ValueError("no nn.Linear of the model was called with this batch")
        self._shares = {name: number / sum(called.values()) for name, number in called.items()}
        self._own = {name: dtype_name(forwards.layers[name].weight.dtype) for name in called}
        self._uneven = {name: _uneven(forwards.layers[name].weight, targets) for name in called}
        bits = {one: 16 if one == BFLOAT16 else BLOCKS_BY_NAME[one].element.bits for one in targets}
        self._costs = {
            name: {"": share * forwards.layers[name].weight.dtype.itemsize / 2}
            | {target: share * bits[target] / 16 for target in targets}
            for name, share in self._shares.items()
        }

    def find(self) -> Recipe:
        """Measure, search, and return the result."""
        forwards, costs = self._forwards, self._costs
        cheaper = {
            name: [
                t for t in self._targets if costs[name][t] < costs[name][""] and t not in self._uneven[name]
            ]
            for name in costs
        }
        number = sum(map(len, cheaper.values()))
        most = 2 * number + _SPARE
        forwards.expected = number + len(self._targets) + len(costs) + 16
        alone = {
            name: {target: forwards.outcome({name: target}) for target in targets}
            for name, targets in cheaper.items()
        }
        together: dict[str, float] = {}
        for target in self._targets:
            formats = {name: target for name, targets in cheaper.items() if target in targets}
            if formats:
                together[target] = self._trial(forwards.outcome(formats)).change
        trials = {name: {t: self._trial(one) for t, one in found.items()} for name, found in alone.items()}
        damages = {name: {t: one.damage for t, one in found.items()} for name, found in trials.items()}
        within = {
            name: {t: one.damage for t, one in found.items() if _size(one) <= self._budget}
            for name, found in trials.items()
        }

        def search(factors: Mapping[str, float], most: int) -> Formats:
            """Return the formats that the search finds when layers damage by these factors more than alone."""
            scaled, scaled_within = (
                {name: {t: x * factors.get(name, 1.0) for t, x in by.items()} for name, by in found.items()}
                for found in (damages, within)
            )
            return cheapest(
                path(scaled_within, costs),
                scaled,
                lambda formats: _size(self._trial(forwards.outcome(formats))),
                self._budget,
                lambda: forwards.made < most,
            )

        # Half of the spare runs, for a first recipe; one for each layer beside the others in it; the rest.
        first = search({}, forwards.made + _SPARE // 2)
        factors = beside(within, first, costs, lambda formats: self._trial(forwards.outcome(formats)).damage)
        kept = min((first, search(factors, most)), key=self._cost)
        return self._result(kept, alone, together, factors)

    def _cost(self, formats: Formats) -> float:
        return sum(costs[formats.get(name, "")] for name, costs in self._costs.items())

    def _trial(self, outcome: Outcome) -> Trial:
        """Return what a run has shown, relative to the loss; infinity where a number is not finite."""
        difference, loss = outcome.loss - self._base.loss, abs(self._base.loss) or 1.0
        error, divergence = (None if x is None else x / loss for x in (outcome.error, outcome.divergence))
        return Trial(
            difference / loss if isfinite(difference) else inf,
            outcome.gradients.get(ALL),
            error,
            inf if divergence is not None and not isfinite(divergence) else divergence,
        )

    def _result(
        self,
        kept: Formats,
        alone: dict[str, dict[str, Outcome]],
        together: dict[str, float],
        factors: Mapping[str, float],
    ) -> Recipe:
        outcome = self._forwards.outcome(kept) if kept else self._base
        whole = self._trial(outcome)
        layers = tuple(
            LayerRecipe(
                name,
                kept.get(name, self._own[name]),
                self._own[name],
                share,
                {t: self._trial(one) for t, one in alone[name].items()},
                outcome.gradients.get(name),
                factors.get(name, 1.0),
            )
            for name, share in self._shares.items()
        )
        unused = [name for name in self._forwards.layers if name not in self._shares]
        remarks = [f"not called with this batch, and left out: {', '.join(unused)}"] if unused else []
        for target in self._targets:
            if names := [name for name, uneven in self._uneven.items() if target in uneven]:
                remarks.append(
                    f"{target} was not tried on {first_few(names)}: its blocks do not divide their weights"
                )
        if self._floor > self._budget * abs(self._base.loss):
            remarks.append(
                "two equal runs differ by more than the budget: nanwatch twice finds what is not repeatable"
            )
        if whole.error is not None and 2 * whole.error > self._budget:
            remarks.append(
                f"the batch is small: the change of the loss has a standard error of {100 * whole.error:.2g} %, so"
                " another batch may be outside the budget"
            )
        alone_errors = [t for one in layers for t in one.alone.values() if t.error]
        near = sum(abs(t.change) <= 2 * (t.error or 0.0) for t in alone_errors)
        if near:
            remarks.append(
                f"{near} of {len(alone_errors)} changes of the loss by one layer are within two standard errors, so"
                " they do not tell layers apart; the divergence of the predictions does"
            )
        step = torch.finfo(self._forwards.loss_dtype).eps
        if step > max(self._budget / 4, 1e-4):  # float16 and bfloat16
            name = dtype_name(self._forwards.loss_dtype)
            remarks.append(
                f"the loss is {name}, which has steps of {100 * step:.2g} %: compute it in float32"
            )
        for library, table in (("torchao", TORCHAO), ("TransformerEngine", TRANSFORMER_ENGINE)):
            without = sorted({one for one in kept.values() if one not in table and one != BFLOAT16})
            if without:
                remarks.append(
                    f"{library} has no configuration for {', '.join(without)} in the JSON document"
                )
        return Recipe(
            loss=self._base.loss,
            floor=self._floor,
            change=whole.change,
            error=whole.error,
            divergence=whole.divergence,
            loss_budget=self._budget,
            cost=self._cost(kept),
            cost_before=self._cost({}),
            layers=layers,
            together=together,
            forwards=self._forwards.made,
            remarks=tuple(remarks),
        )


def _uneven(weight: Tensor, targets: Sequence[str]) -> list[str]:
    """Return the formats whose blocks do not divide the weight.

    Blocks lie along the layer's inputs. NVFP4's kernels also want the outputs to be a multiple of 16.
    """
    outputs, inputs = weight.shape
    forms = [BLOCKS_BY_NAME[one] for one in targets if one != BFLOAT16]
    return [
        form.name
        for form in forms
        if inputs % (form.columns or 1)
        or outputs % ((form.columns if form.has_tensor_scale else form.rows) or 1)
    ]


def _size(trial: Trial) -> float:
    """Return the number that has to be within the budget, which chance alone makes no smaller than the divergence."""
    return max(abs(trial.change), trial.damage)


def _targets(to: Sequence[str]) -> list[str]:
    names = list(dict.fromkeys([to] if isinstance(to, str) else to))
    for name in names:
        if name not in TARGETS:
            hint = close_names(str(name), TARGETS, "names are those of nanwatch.would_fit")
            raise ValueError(f"there is no format {name!r}; the formats are {', '.join(TARGETS)}; {hint}")
    if not names:
        raise ValueError(f"no format was given; the formats are {', '.join(TARGETS)}")
    return names


def _share(given: float | str) -> float:
    try:
        is_percent = isinstance(given, str) and given.strip().endswith("%")
        share = float(given.strip()[:-1]) / 100 if isinstance(given, str) and is_percent else float(given)
    except (TypeError, ValueError):
        share = -1.0
    if not 0 <= share < 1:
        raise ValueError(
            f"the loss budget should be a share of the loss from 0 to 1, such as 0.005 or '0.5%', got {given!r}"
        )
    return share
