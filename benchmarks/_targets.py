"""The rows of the range benchmark, and what they are held to. No torch in here: a saved JSON can be judged too."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
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


Values = list[tuple[float, str]]  # a number, and where it was measured


def _medians(values: Values) -> Values:
    """The median for each number of threads, which is what ends the name of a row."""
    threads = sorted({where.rsplit(", ", 1)[1] for _, where in values})
    return [
        (statistics.median(value for value, where in values if where.endswith(f", {n}")), f"the median, {n}")
        for n in threads
    ]


def judge(rows: Iterable[Row]) -> list[Target]:
    """Every target that the rows say something about; the worst row decides, except where a median is named."""
    rows = list(rows)
    endless = 1 << 62

    def ratios(name: str, least: int = 0, most: int = endless, kind: str = "dense") -> Values:
        """Return a candidate's ratios for tensors of at least and at most so many bytes."""
        chosen = (row for row in rows if row.kind == kind and least <= row.nbytes <= most)
        return [(row.ratios[name], row.where) for row in chosen if name in row.ratios]

    def compiled(least: int, most: int) -> Values:
        """Return the ratios of torch.compile for at least and at most so many elements."""
        chosen = (row for row in rows if row.kind == "dense" and least <= row.numel <= most)
        return [(row.ratios["compile"], row.where) for row in chosen if "compile" in row.ratios]

    plain, floor = ratios("plain", FLOOR_BYTES), ratios("floor", FLOOR_BYTES)
    # The least size is the price of the call itself.
    smallest = [
        (row.seconds["nanwatch"] * 1e6, row.where) for row in rows if (row.kind, row.numel) == ("dense", 16)
    ]
    targets: list[tuple[str, str, float, Values]] = [
        ("share of a plain read's bandwidth from 64 KiB up, median", ">=", 0.95, _medians(plain)),
        ("share of a plain read's bandwidth from 64 KiB up, each", ">=", 0.90, plain),
        ("share of the floor's bandwidth from 64 KiB up, median", ">=", 0.95, _medians(floor)),
        ("share of the floor's bandwidth from 64 KiB up, each", ">=", 0.90, floor),
        ("transformers' functions, times nanwatch", ">=", 40, ratios("transformers")),
        ("torch.compile, times nanwatch", ">=", 1, compiled(0, endless)),
        ("torch.compile, times nanwatch, 1e6 elements", ">=", 1.5, compiled(1_000_000, 1_000_000)),
        ("torch.compile, times nanwatch, up to 1e4 elements", ">=", 30, compiled(0, 10_000)),
        ("abs_range of 16 elements, us", "<=", 0.15, smallest),
        ("tensor_health from memory, times abs_range", "<=", 1.3, ratios("health", MEMORY_BYTES)),
        ("tensor_health in L2, times abs_range", "<=", 2, ratios("health", FLOOR_BYTES, L2_BYTES)),
        (".contiguous() first, times the strided walk", ">=", 1, ratios("contiguous", kind="strided")),
    ]
    judged = []
    for name, sign, bound, values in targets:
        if values:
            value, where = min(values) if sign == ">=" else max(values)
            passed = value >= bound if sign == ">=" else value <= bound
            judged.append(Target(name, f"{sign} {bound:g}", f"{value:#.3g}", passed, where))
    return judged
