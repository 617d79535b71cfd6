"""Reading of the recorder's largest magnitudes at the ends of batches, for forecasts, spikes and suspicion.

Suspicion stands beside the frames of a report: weights that grew or are far from others, and modules nobody called.
"""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from operator import itemgetter
from statistics import median
from typing import TypeAlias

import torch
from torch import Tensor, nn

from ..instrumentation.wrapped_names import is_recorded, named_modules
from ..recording.events import PeakName, Recorder
from ..recording.observe import may_be_called, observe
from ..records.record import Frame
from ..report.events import Suspect
from ..util.messages import suppressing
from ..util.program import each_parameter
from .forecast import Forecast, Forecaster, PeakHistory

Take: TypeAlias = Callable[[int, list[PeakName], bytes], object]
Key: TypeAlias = tuple[str, str]  # module and label

# Adam moves a weight by about the learning rate a step, and the gain of a norm stays below 5 in trained models: eight
# times, three bits, is no healthy training.
_FACTOR = 8
# A bias or a LoRA matrix grows from 0 by any factor. Growth counts from here on.
_LEAST = 0.1
# With fewer siblings their median says nothing.
_LEAST_SIBLINGS = 4
_NUMBER = re.compile(r"\d+")


class Monitor:
    """Reader of a Watch's magnitudes, one batch in `every`."""

    def __init__(self, recorder: Recorder, model: nn.Module, *, every: int, forecasts: bool) -> None:
        self._recorder, self._every = recorder, every
        self._forecaster = Forecaster() if forecasts else None
        self._take: Take | None = None
        history = PeakHistory() if self._forecaster is None else self._forecaster.history
        self.suspicion = Suspicion(model, history, recorder)
        self._looking = threading.Lock()
        if forecasts:
            recorder.gathers_from = 0

    def follow(self, take: Take) -> None:
        """Hand the peaks of each batch to `take`."""
        self._take = take
        self._recorder.gathers_from = 0

    def end(self, batch: int) -> Forecast | None:
        """Take the end of a finite batch, and return the forecast that is new."""
        if batch < self._recorder.gathers_from:
            return None
        # A batch of another thread that ends meanwhile is left out. Waiting could lock up: a signal's handler or the
        # garbage collector may end a batch in here.
        if not self._looking.acquire(blocking=False):
            return None
        try:
            gathered, names, values = self._recorder.take_peaks()
            forecaster, forecast = self._forecaster, None
            if self._take is not None:
                self._take(gathered, names, values)
            if forecaster is not None:
                forecaster.add_names(names)
                if batch == gathered >= forecaster.next:
                    forecast = forecaster.end(batch, values)
                if self._take is None:
                    self._recorder.gathers_from = max(batch + self._every, forecaster.next)
            return forecast
        finally:
            self._looking.release()


class Suspicion:
    """Reader of a model's weights for its reports, over the history that the forecaster keeps."""

    def __init__(self, model: nn.Module, history: PeakHistory, recorder: Recorder) -> None:
        self._model, self._history, self._recorder = weakref.ref(model), history, recorder
        self._versions: dict[int, int] = {}
        with suppressing("the versions of weights could not be noted"), torch._C.DisableTorchFunction():
            self._versions = {id(x): _version(x) for x in each_parameter(model)}

    def suspects(self, frames: Iterable[Frame] = ()) -> tuple[Suspect, ...]:
        """Return the weight that grew most and the one that is farthest above its siblings, where either is far.

        `frames` have later values than the batches that were looked at.
        """
        suspects: dict[Key, Suspect] = {}
        first: dict[Key, float] = {}
        latest: dict[Key, float] = {}
        with suppressing("the growth of weights could not be told"):
            first, latest = self._of_weights(frames)
        if (grown := grown_most(first, latest)) is not None:
            suspects[grown] = Suspect(*grown, latest[grown], first=first[grown])
        if (apart := max(apart_from_siblings(latest), key=itemgetter(0), default=None)) is not None:
            _, key, pattern, siblings = apart
            middle, count = median(siblings), len(siblings)
            suspect = suspects.get(key) or Suspect(*key, latest[key])
            suspects[key] = replace(suspect, siblings=pattern, num_siblings=count, median=middle)
        return tuple(suspects.values())

    def _of_weights(self, frames: Iterable[Frame]) -> tuple[dict[Key, float], dict[Key, float]]:
        """Return the first and the latest finite abs max of each weight."""
        model = self._model()
        named = () if model is None else named_modules(model)
        # A scripted module's dict cannot be iterated without `keys()`.
        weights = {(item.name, label) for item in named for label in item.module._parameters.keys()}  # noqa: SIM118
        first: dict[Key, float] = {}
        latest: dict[Key, float] = {}
        for key, begin, end in self._history.ends():
            if key in weights:
                first.setdefault(key, begin)
                latest[key] = end
        for frame in frames:
            for record in frame.records:
                key = frame.name, record.label
                if record.role == "weight" and record.abs_max and isfinite(record.abs_max):
                    first.setdefault(key, record.abs_max)
                    latest[key] = record.abs_max
        return first, latest

    @property
    def called(self) -> set[str]:
        """Return the names of the modules that were called: those with weights, and those that the history has seen."""
        if not self._history.names:
            return set()
        return {*self._recorder.called(), *(module for module, _ in self._history.names)}

    def never_called(self, frames: Sequence[Frame], observes: Callable[[str], bool]) -> tuple[str, ...]:
        """Return the names of modules that nobody called, though their weights are trained and `observes(name)` holds.

        Empty before the first batch has ended: until then any module may still be called.
        """
        model, called = self._model(), self.called
        if model is None or not called:
            return ()
        reason = "the modules that were never called could not be told"
        with suppressing(reason), torch._C.DisableTorchFunction():
            called |= {frame.name for frame in frames}
            return tuple(self._never_called(model, called, observes))
        return ()

    def _never_called(
        self, model: nn.Module, called: set[str], observes: Callable[[str], bool]
    ) -> Iterator[str]:
        named, uncalled = [], []
        for item in named_modules(model):
            if weights := [x for x in item.module._parameters.values() if x is not None]:
                named.append((item, weights))
                is_meant = item.name not in called and observes(item.name)
                if is_meant and is_recorded(item.module) and may_be_called(item.module):
                    uncalled.append((item, weights))
        if not uncalled:  # most models: no tensor is asked for anything
            return
        # A weight may be shared with a module that was called.
        used = {id(x): x for item, weights in named if item.name in called for x in weights}
        # A checkpoint that was loaded changed each weight once. Steps change all trained ones equally often.
        steps = max(map(self._num_writes, used.values()), default=0)
        for item, weights in uncalled:
            is_shared = any(id(x) in used for x in weights)
            has_gradient = any(x.is_leaf and x.grad is not None for x in weights)
            is_trained = has_gradient or any(self._num_writes(x) >= max(2, steps / 2) for x in weights)
            # A module that is all zero has no magnitude by which it would be known.
            if is_trained and not is_shared and any(observe(x, "", "weight").abs_max for x in weights):
                yield item.name

    def _num_writes(self, x: Tensor) -> int:
        version = _version(x)
        return version - self._versions.get(id(x), version)


def _version(x: Tensor) -> int:
    return 0 if x.is_inference() else x._version


def grown_most(first: Mapping[Key, float], latest: Mapping[Key, float]) -> Key | None:
    """Return the weight whose abs max has grown by the largest factor, None where none has grown eight times."""

    def growth(key: Key) -> float:
        return latest[key] / max(first[key], _LEAST)

    grown = max(latest, key=growth, default=None)
    return grown if grown is not None and growth(grown) >= _FACTOR else None


def apart_from_siblings(latest: Mapping[Key, float]) -> Iterator[tuple[float, Key, str, list[float]]]:
    """Yield the weight that is farthest above its siblings, the same weight of other layers, where one is far.

    `latest` has the abs max by module and label. Yields how many times the siblings' median it is (of 0.1 at least),
    its key, the pattern of the siblings' names, and their abs max.
    """
    groups: dict[Key, list[Key]] = {}
    for key in latest:
        groups.setdefault((_NUMBER.sub("*", key[0]), key[1]), []).append(key)
    for (pattern, _), members in groups.items():
        if len(members) < _LEAST_SIBLINGS:
            continue
        key = max(members, key=latest.__getitem__)
        siblings = [latest[member] for member in members if member is not key]
        factor = latest[key] / max(median(siblings), _LEAST)
        if factor >= _FACTOR:
            yield factor, key, pattern, siblings
