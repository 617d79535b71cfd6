"""Points of many tensors in arrays: what a list for each tensor would hold, and how it falls."""

from __future__ import annotations

from statistics import mean, median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanwatch.monitoring.forecast import LATEST, POINTS, HeadroomHistory

TRACKS = 5


class Lists:
    """The same points in Python lists, one tensor at a time."""

    def __init__(self) -> None:
        self.points: list[list[tuple[float, float]]] = [[] for _ in range(TRACKS)]

    def add(self, track: int, batch: int, bits: float) -> None:
        points = self.points[track]
        if len(points) == POINTS:
            older = points[:-LATEST]
            pairs = [
                ((a + c) / 2, (b + d) / 2) for (a, b), (c, d) in zip(older[::2], older[1::2], strict=True)
            ]
            points[:-LATEST] = pairs
        points.append((batch, bits))


def told(seed: int, batches: int, share: float) -> tuple[HeadroomHistory, Lists]:
    """Both after so many batches, in each of which a tensor is seen with this chance; bits of few different values."""
    rng = np.random.default_rng(seed)
    tracks, lists = HeadroomHistory(), Lists()
    for batch in range(batches):
        # Room is made as tensors are met.
        tracks.grow(min(TRACKS, 1 + batch // 3))
        some = np.flatnonzero(rng.random(min(TRACKS, 1 + batch // 3)) < share)
        bits = rng.integers(-8, 9, len(some)) / 4
        for track, value in zip(some, bits, strict=True):
            lists.add(track, batch, value)
        tracks.add(some, batch, bits)
    return tracks, lists


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(15, 300), st.sampled_from([0.2, 0.7, 1.0]))
def test_each_tensor_has_the_points_of_a_list(seed: int, batches: int, share: float) -> None:
    """A tensor's points do not depend on the others. Sums of halves are exact here, so equal to the last bit."""
    tracks, lists = told(seed, batches, share)
    for track, points in enumerate(lists.points):
        x, y = tracks.points(track)
        assert list(zip(x, y, strict=True)) == points
        assert tracks.count[track] == len(points)
        assert tracks.latest[track] == (points[-1][0] if points else -1)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([15, 40, 130]), st.sampled_from([0.2, 1.0]))
def test_falls_are_lines_through_medians(seed: int, batches: int, share: float) -> None:
    """For tracks with enough points: lines through the medians of the latest five and of five before the middle."""
    tracks, lists = told(seed, batches, share)
    bits, losses, late_losses, spans = tracks.falls(np.arange(TRACKS))
    for track, points in enumerate(lists.points):
        if len(points) < 12:
            continue
        middle = len(points) * 3 // 8
        latest = points[-5:]
        assert bits[track] == median(b for _, b in latest)
        for loss, early in (
            (losses[track], points[middle - 2 : middle + 3]),
            (late_losses[track], points[-10:-5]),
        ):
            width = mean(x for x, _ in latest) - mean(x for x, _ in early)
            assert loss == pytest.approx((median(b for _, b in early) - bits[track]) / width)
        assert spans[track] == points[-1][0] - points[0][0]


def test_tracks_with_few_points_have_no_error() -> None:
    """With one point there is no fall, and no tracks have none."""
    tracks = HeadroomHistory()
    tracks.grow(2)
    tracks.add(np.array([0]), 3, np.array([5.0]))
    bits, losses, late, spans = tracks.falls(np.array([0]))
    assert (bits[0], spans[0]) == (5.0, 0.0)
    assert not losses[0] > 0
    assert not late[0] > 0
    assert all(len(found) == 0 for found in tracks.falls(np.empty(0, np.int64)))


def test_batches_can_be_told_apart_after_years() -> None:
    """Numbers of batches are whole beyond the 2^24 that float32 counts to."""
    tracks = HeadroomHistory()
    tracks.grow(1)
    first = 1 << 40
    for batch in range(first, first + 3 * POINTS):
        tracks.add(np.array([0]), batch, np.array([1.0], np.float32))
    assert np.diff(tracks.points(0)[0]).min() >= 1
