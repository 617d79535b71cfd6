"""Merges of made-up ranks, many or few."""

from __future__ import annotations

import json
from dataclasses import replace
from math import inf, nan
from pathlib import Path

from hypothesis import strategies as st

from nanwatch.ranks.merge import Digest, Merged, WeightKey
from nanwatch.ranks.merge_pages import document
from nanwatch.records.record import Frame, Record
from nanwatch.report.report import Report
from support.sightings import finding

NAMES = ["", "a", "a.b", "c"]
BITS = st.one_of(st.floats(-0.5, 40), st.sampled_from([-inf, inf]))
PAIRS = st.sampled_from([(0.0, 1.0), (0.5, 1.0), (nan, nan), (1e-45, 3.0e38), (0.0, inf)])
PLACES = st.builds(
    WeightKey,
    st.integers(0, 2),
    st.sampled_from(NAMES),
    st.sampled_from(["weight", "bias"]),
    st.sampled_from([None, (), (2, 3)]),
)


@st.composite
def digests(draw: st.DrawFn, most: int = 9) -> list[Digest]:
    """Draw digests of some ranks, each with or without a finding."""
    ranks = draw(st.lists(st.integers(0, 40), unique=True, min_size=1, max_size=most).map(sorted))
    found = []
    for rank in ranks:
        seen = None
        if draw(st.booleans()):
            kind = draw(st.sampled_from(["produced", "weight", "data"]))
            seen = replace(
                finding(kind, draw(st.integers(0, 2)), rank=rank), sequence=draw(st.integers(0, 3))
            )
        headroom = draw(st.dictionaries(st.sampled_from(NAMES), BITS, max_size=4))
        found.append(Digest(rank, seen, headroom, draw(st.dictionaries(PLACES, PAIRS, max_size=4))))
    return found


def merged_of(found: list[Digest]) -> Merged:
    """A merge of these and nothing else."""
    return Merged(tuple(sorted(found, key=lambda one: one.rank)), ())


def saved(folder: Path, name: str, found: list[Digest]) -> Path:
    """The document of a merge, as `merge --json` prints it."""
    path = folder / name
    path.write_text(json.dumps(document(merged_of(found)), allow_nan=False))
    return path


def report(rank: int, *, num_frames: int = 21, low: int = -1) -> Report:
    """A healthy rank of so many frames of Linear layers in float16; rank `low` has 9 bits less than others."""
    made = 512.0 if rank == low else 1.0 + rank % 7 / 10
    frames = []
    for i in range(num_frames):
        records = (
            Record("weight", "weight", (64, 64), "float16", 1e-4, 0.5 + i / 64, True, None),
            Record("bias", "weight", (64,), "float16", 1e-4, 0.25, True, None),
            Record("input[0]", "input", (8, 64), "float16", 1e-3, made, True, None),
            Record("output", "output", (8, 64), "float16", 1e-3, made, True, None),
        )
        frames.append(Frame(7, f"layers.{i // 4}.part.{i % 4}", "Linear", records))
    return Report(tuple(frames), None, 7, rank)


def few(hostile: str = "") -> list[Digest]:
    """Four ranks: rank 2 was first, rank 1 holds another weight, rank 3 has not seen one module."""
    found = []
    for rank in range(4):
        seen = None
        if rank in (0, 2):
            seen = replace(
                finding("produced", 5, module="layer" + hostile, label="output" + hostile, rank=rank),
                sequence=9 - rank,
            )
        headroom = {"layer" + hostile: -inf if rank == 2 else 12.5 + rank, "": 1.5, "wide": inf}
        if rank < 3:
            headroom["low" + hostile] = 7.0 - rank
        place = WeightKey(5, "layer" + hostile, "weight" + hostile, (2, 2))
        found.append(Digest(rank, seen, headroom, {place: (0.25, 3.0 if rank == 1 else 2.0)}))
    return found
