"""What the checks of an audit see: one step, the calls before it, and who else holds weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn
from torch.optim.optimizer import Optimizer

from .samples import Key, StepSamples, WeightSample
from .window import Call, Clip, Probe


def ancestors(module: str) -> Iterator[str]:
    """Yield the name of the module and of all that it is in, up to the root."""
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""


class Suspect(NamedTuple):
    """A weight that may have a fault of this kind; `label` is None where a module is meant."""

    kind: str
    module: str
    label: str | None
    numbers: Mapping[str, float] = {}


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
