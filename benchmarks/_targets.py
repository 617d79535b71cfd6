"""The rows of the range benchmark, and what they are held to. No torch in here: a saved JSON can be judged too."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

FLOOR_BYTES = 64 << 10  # below this the price of a call is part of the answer
L2_BYTES = 1 << 20  # fits the second-level cache of any core this decade
# Memory, not a cache: cloud machines report the last-level cache of a whole socket (hundreds of MB) of which one
# guest gets an unknown share, so the line is drawn by hand.
MEMORY_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor at one number of threads.

    `seconds`: median time of a call, by candidate. `ratios`: median over rounds of time(candidate) /
    time(nanwatch.abs_range), so above 1 means slower than nanwatch.
    """

    kind: str  # "dense" or "strided"
    dtype: str
    shape: str
    numel: int
    nbytes: int
    threads: int
    seconds: Mapping[str, float]
    ratios: Mapping[str, float]

    @property
    def where(self) -> str:
        return f"{self.dtype} {self.shape}, {self.threads} thread{'s' * (self.threads > 1)}"

    def to_json(self) -> dict[str, Any]:
        bandwidth = self.nbytes / self.seconds["nanwatch"] / 1e9
        return {**asdict(self), "gigabytes_per_second": bandwidth}


@dataclass(frozen=True, slots=True)
class Target:
    """One promise, the worst that was found, and where."""

    name: str
    wanted: str
    found: str
    passed: bool
    where: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def _at_least(name: str, bound: float, values: Sequence[tuple[float, str]]) -> list[Target]:
    if not values:
        return []
    value, where = min(values)
    return [Target(name, f">= {bound:g}", f"{value:#.3g}", value >= bound, where)]


def _at_most(name: str, bound: float, values: Sequence[tuple[float, str]]) -> list[Target]:
    if not values:
        return []
    value, where = max(values)
    return [Target(name, f"<= {bound:g}", f"{value:#.3g}", value <= bound, where)]


def _medians(values: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """The median for each number of threads, which is what ends the name of a row."""
    threads = sorted({where.rsplit(", ", 1)[1] for _, where in values})
    return [
        (statistics.median(value for value, where in values if where.endswith(f", {n}")), f"the median, {n}")
        for n in threads
    ]


def judge(rows: Iterable[Row]) -> list[Target]:
    """Every target that the rows say something about; the worst row decides, except where a median is named."""
    dense: list[Row] = []
    strided: list[Row] = []
    for row in rows:
        (dense if row.kind == "dense" else strided).append(row)

    def ratios(
        name: str, *, numel: range | None = None, nbytes: range | None = None
    ) -> list[tuple[float, str]]:
        return [
            (row.ratios[name], row.where)
            for row in dense
            if name in row.ratios
            and (numel is None or row.numel in numel)
            and (nbytes is None or row.nbytes in nbytes)
        ]

    endless = 1 << 62
    plain, floor = (ratios(name, nbytes=range(FLOOR_BYTES, endless)) for name in ("plain", "floor"))
    # The least size is the price of the call itself.
    smallest = [(row.seconds["nanwatch"] * 1e6, row.where) for row in dense if row.numel == 16]
    return [
        *_at_least("share of a plain read's bandwidth from 64 KiB up, median", 0.95, _medians(plain)),
        *_at_least("share of a plain read's bandwidth from 64 KiB up, each", 0.90, plain),
        *_at_least("share of the floor's bandwidth from 64 KiB up, median", 0.95, _medians(floor)),
        *_at_least("share of the floor's bandwidth from 64 KiB up, each", 0.90, floor),
        *_at_least("transformers' functions, times nanwatch", 40, ratios("transformers")),
        *_at_least("torch.compile, times nanwatch", 1, ratios("compile")),
        *_at_least(
            "torch.compile, times nanwatch, 1e6 elements",
            1.5,
            ratios("compile", numel=range(1_000_000, 1_000_001)),
        ),
        *_at_least(
            "torch.compile, times nanwatch, up to 1e4 elements", 30, ratios("compile", numel=range(10_001))
        ),
        *_at_most("abs_range of 16 elements, us", 0.15, smallest),
        *_at_most(
            "tensor_health from memory, times abs_range",
            1.3,
            ratios("health", nbytes=range(MEMORY_BYTES, endless)),
        ),
        *_at_most(
            "tensor_health in L2, times abs_range",
            2,
            ratios("health", nbytes=range(FLOOR_BYTES, L2_BYTES + 1)),
        ),
        *_at_least(
            ".contiguous() first, times the strided walk",
            1,
            [(row.ratios["contiguous"], row.where) for row in strided],
        ),
    ]
