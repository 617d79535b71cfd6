"""Epochs of samplers that shuffle, which have the same order while nobody calls `set_epoch`."""

from __future__ import annotations

import weakref
from typing import Any

# Steps in an epoch. Two loaders may begin with one sampler, or a batch be looked at before.
_LEAST_STEPS = 2


class Epochs:
    """The latest epoch of each DistributedSampler, and the step at which it began."""

    def __init__(self) -> None:
        self._begun: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()

    def repeated(self, sampler: Any, step: int) -> int | None:
        """Take the beginning of an epoch in training, and return its number if the order is that of the one before."""
        if not getattr(sampler, "shuffle", False):
            return None
        epoch, begun = self._begun.get(sampler, (-1, 0))
        self._begun[sampler] = sampler.epoch, step
        return epoch if epoch == sampler.epoch and step - begun >= _LEAST_STEPS else None
