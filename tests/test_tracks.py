"""Points of many tensors in arrays: what a list for each tensor would hold, and its rising and falling pairs."""

from __future__ import annotations

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from nanwatch.tracks import LATEST, POINTS, Tracks

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


def told(seed: int, batches: int, share: float) -> tuple[Tracks, Lists]:
    """Both after so many batches, in each of which a tensor is seen with this chance; bits of few different values."""
    rng = np.random.default_rng(seed)
    tracks, lists = Tracks(), Lists()
    for batch in range(batches):
        # Room is made as tensors are met.
        tracks.grow(min(TRACKS, 1 + batch // 3))
        some = np.flatnonzero(rng.random(min(TRACKS, 1 + batch // 3)) < share)
        bits = rng.integers(-8, 9, len(some)) / 4
        lowest = tracks.lowest(some)
        for track, value, low in zip(some, bits, lowest, strict=True):
            before = [b for _, b in lists.points[track]][-8:]
            assert (low == min(before)) if before else np.isnan(low)
            lists.add(track, batch, value)
        tracks.add(some, batch, bits)
    return tracks, lists


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32), st.integers(15, 300), st.sampled_from([0.2, 0.7, 1.0]))
def test_each_tensor_has_the_points_of_a_list(seed: int, batches: int, share: float) -> None:
    """Whatever the others do; sums of halves are exact here, so to the last bit."""
    tracks, lists = told(seed, batches, share)
    for track, points in enumerate(lists.points):
        x, y = tracks.points(track)
        assert list(zip(x, y, strict=True)) == points
        assert tracks.count[track] == len(points)
        assert tracks.latest[track] == (points[-1][0] if points else -1)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([15, 40, 130]), st.sampled_from([0.2, 1.0]))
def test_the_balance_counts_pairs(seed: int, batches: int, share: float) -> None:
    """Of the latest n points of each, for every n: pairs that rise less pairs that fall, counted one by one."""
    tracks, lists = told(seed, batches, share)
    balance = tracks.balance(np.arange(TRACKS))
    for track, points in enumerate(lists.points):
        for n in range(POINTS + 1):
            latest = [bits for _, bits in points[-n:]] if n else []
            expected = sum(int(b > a) - int(b < a) for a, b in combinations(latest, 2))
            assert balance[track, n] == expected


def test_more_tensors_than_are_compared_at_once() -> None:
    """The parts are put together in their order."""
    tracks = Tracks()
    tracks.grow(1000)
    everyone = np.arange(1000)
    for batch in range(3):
        tracks.add(everyone, batch, (everyone % 7 - 3.0) * batch)
    assert (tracks.balance(everyone)[:, 3] == 3 * np.sign(everyone % 7 - 3)).all()
    assert tracks.balance(everyone[:0]).shape == (0, POINTS + 1)


def test_batches_can_be_told_apart_after_years() -> None:
    """Numbers of batches are whole beyond the 2^24 that float32 counts to."""
    tracks = Tracks()
    tracks.grow(1)
    first = 1 << 40
    for batch in range(first, first + 3 * POINTS):
        tracks.add(np.array([0]), batch, np.array([1.0], np.float32))
    assert np.diff(tracks.points(0)[0]).min() >= 1
