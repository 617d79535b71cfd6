"""The headroom of many tensors over the batches: of each the latest points, in arrays of all."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Floats: TypeAlias = "np.ndarray[Any, np.dtype[np.floating[Any]]]"
Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"

# Points kept of a tensor; when there are more, the older are joined by twos, so that they reach ever further back. The
# latest 24 stay as close together as they came.
POINTS = 64
LATEST = 24
_JOINED = (POINTS - LATEST) // 2 * 2
_FEW = 5
_PLACES = np.arange(_FEW)


class Tracks:
    """A track is a number from 0, `grow` brings it in. 0.8 KiB a track.

    There is `room` for so many from the start: what is made in the first batch would lie between its activations.
    """

    def __init__(self, room: int = 0) -> None:
        self.latest: Numbers = np.empty(0, np.int64)  # batch of the last point, -1 without any
        self.count: Numbers = np.empty(0, np.int64)  # of points
        self._batches: Floats = np.full((room, POINTS), np.nan)  # which float32 cannot count past 2^24
        self._bits: Floats = np.full((room, POINTS), np.nan, np.float32)

    def grow(self, number: int) -> None:
        """Have room for so many tracks."""
        more = number - len(self.count)
        if more <= 0:
            return
        self.latest = np.append(self.latest, np.full(more, -1))
        self.count = np.append(self.count, np.zeros(more, np.int64))
        rows = len(self._bits)
        if number > rows:
            spare = np.full((max(number, 2 * rows) - rows, POINTS), np.nan)
            self._batches = np.concatenate([self._batches, spare])
            self._bits = np.concatenate([self._bits, spare.astype(np.float32)])

    def add(self, tracks: Numbers, batch: int, bits: Floats) -> None:
        """A point of each of these, all at the same batch."""
        full = tracks[self.count[tracks] == POINTS]
        if len(full):
            for points in (self._batches, self._bits):
                old = points[full]
                pairs = (old[:, 0:_JOINED:2] + old[:, 1:_JOINED:2]) / 2
                rest = np.full((len(full), _JOINED // 2), np.nan, points.dtype)
                points[full] = np.concatenate([pairs, old[:, _JOINED:], rest], axis=1)
            self.count[full] -= _JOINED // 2
        self._batches[tracks, self.count[tracks]] = batch
        self._bits[tracks, self.count[tracks]] = bits
        self.count[tracks] += 1
        self.latest[tracks] = batch

    def falls(self, tracks: Numbers) -> tuple[Floats, Floats, Floats, Floats]:
        """Return of each: its bits now, the loss a batch, the late loss a batch, how far back its points reach.

        Lines go through the medians of five points: the latest, and those before the middle, or just before the latest.
        """
        count = self.count[tracks]
        bits, now = self._median(tracks, count - _FEW)
        with np.errstate(divide="ignore", invalid="ignore"):
            losses, late = (
                (then - bits) / (now - at)
                for then, at in (
                    self._median(tracks, count * 3 // 8 - _FEW // 2),
                    self._median(tracks, count - 2 * _FEW),
                )
            )
        return bits, losses, late, self.latest[tracks] - self._batches[tracks, 0]

    def _median(self, tracks: Numbers, first: Numbers) -> tuple[Floats, Floats]:
        """The median of five points from this one, and their mean batch."""
        rows, places = tracks[:, None], np.maximum(first[:, None] + _PLACES, 0)
        return np.sort(self._bits[rows, places], axis=1)[:, _FEW // 2], self._batches[rows, places].mean(
            axis=1
        )

    def points(self, track: int) -> tuple[Floats, Floats]:
        """Batches and bits, oldest first, in float64."""
        count = self.count[track]
        return self._batches[track, :count].astype(float), self._bits[track, :count].astype(float)
