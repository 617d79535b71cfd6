"""Suspicion beside the frames of a report: modules that nobody called, and weights that grew or are far from others."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from ..instrumentation.wrapped_names import Named, is_recorded, named_modules
from ..monitoring.growth import WeightGrowth
from ..recording.observe import observe, past_torch_function
from ..report.record import Frame
from ..report.suspect import Suspect
from ..util.modules import each_parameter
from ..util.visible import suppressed

# nn.MultiheadAttention holds it for its weights, and never calls it.
_HOLDS_WEIGHTS = "NonDynamicallyQuantizableLinear"


class Suspicion:
    """Reader of the weights of a model for its reports. Until one is made it costs nothing.

    `observes(name)` says whether the calls of a module are recorded.
    """

    def __init__(self, model: nn.Module, observes: Callable[[str], bool], growth: WeightGrowth) -> None:
        self._model = weakref.ref(model)
        self._observes = observes
        self._growth = growth
        self._versions: dict[int, int] = {}
        try:
            with past_torch_function():
                self._versions = {id(x): _version(x) for x in each_parameter(model)}
        except Exception:
            suppressed("the versions of weights could not be noted")

    def suspects(self, frames: Sequence[Frame]) -> tuple[Suspect, ...]:
        """Return the weights that grew much or are far from their siblings."""
        try:
            return self._growth.suspects(frames)
        except Exception:
            suppressed("the growth of weights could not be told")
            return ()

    def never_called(self, frames: Sequence[Frame]) -> tuple[str, ...]:
        """Return the names of modules that nobody called, though their weights are trained.

        Empty before the first batch has ended: until then any module may still be called.
        """
        model, called = self._model(), self._growth.called
        if model is None or not called:
            return ()
        try:
            with past_torch_function():
                return tuple(self._never_called(model, called | {frame.name for frame in frames}))
        except Exception:
            suppressed("the modules that were never called could not be told")
            return ()

    def _never_called(self, model: nn.Module, called: set[str]) -> Iterator[str]:
        named = [(one, own) for one in named_modules(model) if (own := _weights(one.module))]
        left = [(one, own) for one, own in named if one.name not in called and self._may_be_called(one)]
        if not left:  # most models: no tensor is asked for anything
            return
        # A weight may be shared with a module that was called.
        used = {id(x): x for one, own in named if one.name in called for x in own}
        # A checkpoint that was loaded changed each weight once. Steps change all trained ones equally often.
        steps = max(map(self._num_writes, used.values()), default=0)
        for one, own in left:
            if (
                any(self._is_trained(x, steps) for x in own)
                and not any(id(x) in used for x in own)
                # A module that is all zero has no magnitude by which it would be known.
                and any(observe(x, "", "weight").abs_max for x in own)
            ):
                yield one.name

    def _may_be_called(self, one: Named) -> bool:
        return (
            self._observes(one.name)
            and is_recorded(one.module)
            and type(one.module).__name__ != _HOLDS_WEIGHTS
            and type(one.module).forward is not nn.Module.forward
        )

    def _is_trained(self, x: Tensor, steps: int) -> bool:
        if x.is_leaf and x.grad is not None:
            return True
        return self._num_writes(x) >= max(2, steps / 2)

    def _num_writes(self, x: Tensor) -> int:
        version = _version(x)
        return version - self._versions.get(id(x), version)


def _weights(module: nn.Module) -> list[Tensor]:
    return [x for x in module._parameters.values() if x is not None]


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version
