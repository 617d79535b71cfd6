"""Growth of weights since a watch began, and weights that are far from their siblings in the other layers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from math import inf, isfinite
from statistics import median
from typing import Any, TypeAlias

import numpy as np
from torch import nn

from ..instrumentation.wrapped_names import named_modules
from ..recording.events import PeakName
from ..report.record import Frame
from ..report.suspect import Suspect

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.floating[Any]]]"
_Key: TypeAlias = tuple[str, str]  # module and label

# Adam moves a weight by about the learning rate a step, and the gain of a norm stays below 5 in trained models: eight
# times, three bits, is no healthy training.
_FACTOR = 8
# A bias or a LoRA matrix grows from 0 by any factor. Growth counts from here on.
_LEAST = 0.1
# Fewer have no middle from which one could be far.
_LEAST_SIBLINGS = 4
_NUMBER = re.compile(r"\d+")


class WeightGrowth:
    """The first and the latest abs max of each weight, from the batches that the forecaster looks at.

    `called` are the modules that had a tensor with a magnitude in one of them.
    """

    def __init__(self, model: nn.Module) -> None:
        self.called: set[str] = set()
        self._weights = {
            # A scripted module's dict cannot be iterated without `keys()`.
            (one.name, key)
            for one in named_modules(model)
            for key in one.module._parameters.keys()  # noqa: SIM118
        }
        self._names: list[_Key] = []
        self._first: Floats = np.zeros(0)
        self._latest: Floats = np.zeros(0)

    def take(self, names: Sequence[PeakName], values: bytes) -> None:
        """Take the peaks of a batch as Recorder.take_peaks gives them."""
        self.called.update(module for module, _, _ in names)
        self._names += [(module, label) for module, label, _ in names]
        found = np.frombuffer(values)
        new = len(found) - len(self._first)
        if new:
            self._first, self._latest = (np.append(one, np.zeros(new)) for one in (self._first, self._latest))
        self._latest = np.where(found > 0, found, self._latest)
        self._first = np.where(self._first > 0, self._first, self._latest)

    def suspects(self, frames: Iterable[Frame] = ()) -> tuple[Suspect, ...]:
        """Return the weight that grew most and the one that is farthest above its siblings, where either is far.

        `frames` have later values than the batches that were looked at.
        """
        first, latest = self._of_weights(frames)
        found = {key: Suspect(*key, latest[key]) for key in latest}
        grown = max(latest, key=lambda key: latest[key] / max(first[key], _LEAST), default=None)
        if grown is not None and latest[grown] >= _FACTOR * max(first[grown], _LEAST):
            found[grown] = found[grown].grown_from(first[grown])
        apart = self._farthest(latest)
        if apart is not None:
            key, group, siblings = apart
            found[key] = found[key].apart_from(group, siblings)
        return tuple(one for one in found.values() if one.first is not None or one.siblings)

    def _of_weights(self, frames: Iterable[Frame]) -> tuple[dict[_Key, float], dict[_Key, float]]:
        first: dict[_Key, float] = {}
        latest: dict[_Key, float] = {}
        for key, begin, end in zip(self._names, self._first.tolist(), self._latest.tolist(), strict=True):
            if key in self._weights and 0 < begin < inf and end < inf:
                first.setdefault(key, begin)
                latest[key] = end
        for frame in frames:
            for record in frame.records:
                key = frame.name, record.label
                if record.role == "weight" and record.abs_max and isfinite(record.abs_max):
                    first.setdefault(key, record.abs_max)
                    latest[key] = record.abs_max
        return first, latest

    @staticmethod
    def _farthest(latest: dict[_Key, float]) -> tuple[_Key, str, list[float]] | None:
        groups: dict[_Key, list[_Key]] = {}
        for key in latest:
            groups.setdefault((_NUMBER.sub("*", key[0]), key[1]), []).append(key)
        found: tuple[float, _Key, str, list[float]] | None = None
        for (pattern, _), members in groups.items():
            if len(members) < _LEAST_SIBLINGS:
                continue
            key = max(members, key=latest.__getitem__)
            siblings = [latest[one] for one in members if one is not key]
            factor = latest[key] / max(median(siblings), _LEAST)
            if factor >= _FACTOR and (found is None or factor > found[0]):
                found = factor, key, pattern, siblings
        return None if found is None else found[1:]
