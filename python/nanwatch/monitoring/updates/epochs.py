"""Epochs of samplers that shuffle, which have the same order while nobody calls `set_epoch`."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

from ...util.place import Place
from . import blame, taps

# Steps in an epoch. Two loaders may begin with one sampler, or a batch be looked at before.
_LEAST_STEPS = 2


class Epochs:
    """Listener to the beginnings of a DistributedSampler's epochs.

    `step` returns the present step, None outside training. `tell` gets the line of a loop whose order repeats.
    """

    def __init__(self, step: Callable[[], int | None], tell: Callable[[Place | None, int], object]) -> None:
        self._step = step
        self._tell = tell
        self._begun: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()
        taps.epochs.add(self)

    def remove(self) -> None:
        """Listen no more."""
        taps.epochs.remove(self)

    def epoch_begins(self, sampler: Any) -> None:
        """Take the beginning of an epoch."""
        step = self._step()
        if step is None or not getattr(sampler, "shuffle", False):
            return
        epoch, begun = self._begun.get(sampler, (-1, 0))
        self._begun[sampler] = sampler.epoch, step
        if epoch == sampler.epoch and step - begun >= _LEAST_STEPS:
            self._tell(blame.place_of(sys._getframe(1)), epoch)
