"""Training and evaluation mode: trainings and evaluations in the wrong one, and statistics that should rest."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ..instrumentation.wrapped_names import named_modules
from ..report.finding import Place
from .suspects import Suspect
from .window import held_by_optimizers

_DROPS = ("p", "dropout", "drop_prob", "dropout_p", "attention_dropout")
# An evaluation makes calls without grad mode in a row, or one after so many forwards and steps of the training. Others
# make the fake samples of a GAN, or condition a model on its own output.
_RARE, _EVALUATIONS = 8, 2


def _drops(module: nn.Module) -> bool:
    """Return whether a module of its own has dropout that is not 0."""
    values = (vars(module).get(name) for name in _DROPS)
    return any(isinstance(value, float) and 0 < value < 1 for value in values)


def _takes_statistics(module: nn.Module) -> bool:
    """Return whether a module in training mode changes running statistics. Those with other momenta recalibrate."""
    if not isinstance(module, _NormBase) or not module.track_running_stats:
        return False
    return module.momentum is not None and module.momentum < 1


def trained_in_evaluation_mode(model: nn.Module, called: set[str], has_trained: bool) -> Iterator[Suspect]:
    """Yield the model, if it is trained in evaluation mode. `has_trained`: it was in training mode before."""
    for name, _, module in named_modules(model) if not model.training else ():
        if name in called and (_drops(module) or (_takes_statistics(module) and has_trained)):
            yield Suspect("train-mode-wrong", "", None)
            return


def counting(model: nn.Module, called: set[str]) -> Iterator[Suspect]:
    """Yield batch norms that no optimizer trains, and whose statistics are not frozen with their weights."""
    for name, _, module in named_modules(model):
        if not (module.training and name in called and _takes_statistics(module)):
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
        self._first: Callable[[], Tensor | None] = lambda: None  # inputs of the calls in a row
        self._latest: Callable[[], Tensor | None] = lambda: None
        self._progress = 0  # forwards in grad mode and steps since the latest call
        self._gaps: list[int] = []
        self._evaluation: list[Place | None] = []

    def called(self, model: nn.Module, inputs: Tensor | None, find_place: Callable[[], Place | None]) -> None:
        """Take a call without grad mode."""
        reference = (lambda: None) if inputs is None else weakref.ref(inputs)
        is_row = self._progress == 0 and bool(self._gaps) and (inputs is None or inputs is not self._latest())
        if self._progress:
            self._gaps.append(self._progress)
            self._first, self._evaluation, self._progress = reference, [], 0
        self._latest = reference
        is_rare = len(self._gaps) > _EVALUATIONS and min(self._gaps[1:]) >= _RARE
        if (is_row or is_rare) and not self._evaluation:
            modules = (item.module for item in named_modules(model))
            if any(module.training and (_drops(module) or _takes_statistics(module)) for module in modules):
                self._evaluation = [find_place()]

    def went_on(self) -> None:
        """Take a step of an optimizer."""
        self._progress += 1

    def trained(self, inputs: Tensor | None = None) -> list[Place | None]:
        """Take a call in grad mode. Return the line of the evaluation that has ended with it, in a list, or []."""
        self._progress += 1
        evaluation, self._evaluation = self._evaluation, []
        is_second_pass = inputs is not None and (inputs is self._first() or inputs is self._latest())
        return [] if is_second_pass else evaluation
