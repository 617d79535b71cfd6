"""Narrowest format that would hold the outputs and the weights of a module, by the ranges of a whole trace.

A range decides whether anything overflows. It decides how many elements become zero only where that is none or all. The
share is known of batches that were recorded with `Trace(counts=True)`, which has the exponents of all elements.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf, prod
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from ..numerics.exponents import ExponentHistogram
from ..numerics.fit import check_margin, edges, narrowest, would_fit
from ..records.note import EXCUSES
from ..util import reading
from ..util.visible import without_wrappers
from .trace import unreadable
from .trace_file import ENDS, Strings, Trace, ends_of, strings

# The narrowest first, and among formats of one width the more precise one.
FORMATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32")
LOST = 0.01
Part: TypeAlias = Literal["outputs", "weights"]
Verdict: TypeAlias = Literal["fits", "overflows", "no room", "becomes zero", "not finite"]
_PARTS: dict[str, Part] = {"output": "outputs", "weight": "weights", "buffer": "weights"}
# Where the share is not known, an element that becomes zero has to be less than this part of the largest element of its
# tensor. float16 itself rounds off as much.
NEGLIGIBLE = 2.0**-12
_MOST = 2**62  # elements; more is a damaged file
_Array: TypeAlias = "np.ndarray[Any, Any]"


class Share(NamedTuple):
    """Share of elements, 0.0 to 1.0: at least and at most."""

    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Holding:
    """Effect of a cast to `dtype` on the outputs, or on the weights and buffers, of one module over a trace.

    The verdict is "fits", or why it does not: something "overflows", or would with the margin ("no room"), "becomes
    zero" in too large a share, or is "not finite" as it is. `overflow`, `zero` and `subnormal` are shares of the
    elements that are not zero. `is_counted`: the exponents of all were recorded, so the shares are known to a power of
    two. Otherwise they are bounds by the ranges.
    """

    module: str
    part: Part
    dtypes: tuple[str, ...]
    dtype: str
    abs_max: float
    verdict: Verdict
    overflow: Share
    zero: Share
    subnormal: Share
    is_counted: bool

    @property
    def fits(self) -> bool:
        """Return whether nothing overflows, with the margin, and little enough becomes zero."""
        return self.verdict == "fits"


@dataclass(frozen=True, slots=True)
class Need:
    """The outputs, or the weights and buffers, of one module over a trace.

    `abs_max` is the largest magnitude; `abs_min` the smallest that is not zero among the smallest magnitudes of the
    records, None when each was zero: then what is smallest above zero is not known. `fits` is the narrowest of FORMATS
    that has this verdict, see `Holding`. `holds_all` is the narrowest in which nothing overflows or falls below the
    normal numbers; None where there is none, as with a nan or an inf. `has_zero`: a record had a zero.
    """

    module: str
    part: Part
    dtypes: tuple[str, ...]
    abs_min: float | None
    abs_max: float
    isfinite: bool
    has_zero: bool
    fits: str | None
    holds_all: str | None


def fits(
    trace: Trace | str | os.PathLike[str], margin_bits: float = 1.0, lost: float = LOST
) -> tuple[Need, ...]:
    """Return a Need for the outputs and one for the weights of each module, in the order in which they were first seen.

    `margin_bits` are left free at both ends of a format: with 1 the values may still double. `lost` is the share of
    elements that may become zero. Integers and bools, masks, and infinities that are allowed do not count. Raises
    ValueError for a margin outside 0 to 1000, a share outside 0 to 1.
    """
    seen = _Seen.of(trace, margin_bits, lost)
    holdings = {name: seen.holdings(name) for name in FORMATS}
    found = []
    for i in range(len(seen.lines)):
        module, part, dtypes = seen.lines[i]
        least = None if seen.smallest[i] == inf else float(seen.smallest[i])
        most, good = float(seen.largest[i]), not seen.nonfinite[i]
        found.append(
            Need(
                module=module,
                part=part,
                dtypes=dtypes,
                abs_min=least,
                abs_max=most,
                isfinite=good,
                has_zero=bool(seen.has_zero[i]),
                fits=next((name for name in FORMATS if holdings[name][i].fits), None),
                holds_all=narrowest(
                    (least or 0.0, most), margin_bits=margin_bits, subnormals=False, formats=FORMATS
                )
                if good
                else None,
            )
        )
    return tuple(found)


def holdings(
    trace: Trace | str | os.PathLike[str], dtype: str, margin_bits: float = 1.0, lost: float = LOST
) -> tuple[Holding, ...]:
    """Return the effect of the format `dtype` on the outputs and on the weights of each module; see `fits`.

    Raises ValueError for a format that is none of FORMATS, too.
    """
    if dtype not in FORMATS:
        raise ValueError(
            f"{dtype!r} is no format that a trace is judged by; accepted are {', '.join(FORMATS)}"
        )
    return tuple(_Seen.of(trace, margin_bits, lost).holdings(dtype))


class _Seen:
    """The records of a trace that count, as arrays, in groups: a line for each module and part."""

    @classmethod
    def of(cls, trace: Trace | str | os.PathLike[str], margin_bits: float, lost: float) -> _Seen:
        """Read the trace; checks the margin and the share first."""
        check_margin(margin_bits)
        if not 0 <= lost <= 1:
            raise ValueError(f"lost is {lost!r}; accepted is a share of 0.0 to 1.0")
        return cls(trace if isinstance(trace, Trace) else Trace.open(trace), margin_bits, lost)

    def __init__(self, trace: Trace, margin_bits: float, lost: float) -> None:
        self._room = 2.0**margin_bits
        self._lost = lost
        columns = (*ENDS, "module", "role", "shape", "abs_min", "abs_max", "isfinite", "note", "exponents")
        table = trace.table(columns)
        module, role, shape, dtype, note, exponents = (
            strings(table[name]) for name in ("module", "role", "shape", "dtype", "note", "exponents")
        )
        ends = ends_of(table)
        part = _coded(
            role, lambda value: ("outputs", "weights").index(_PARTS[value]) if value in _PARTS else -1
        )
        counts = (part >= 0) & ~np.isnan(ends.largest)
        counts &= _coded(note, EXCUSES.__contains__) <= 0
        counts &= ~table["abs_max"].is_null().to_numpy()
        groups = (module.codes.astype(np.int64) * 2 + part)[counts]
        names, first, group = np.unique(groups, return_index=True, return_inverse=True)
        # Lines in the order in which they were first seen.
        order = np.argsort(first)
        self._group = np.argsort(order)[group]
        names = names[order]
        num = len(names)

        self._low = table["abs_min"].to_numpy()[counts]
        self._high = table["abs_max"].to_numpy()[counts]
        # A bound from below for all elements above zero. For a tensor that holds a zero, it is its format's smallest
        # number.
        least = ends.smallest_subnormal[counts]
        self._least = np.where(self._low > 0, self._low, least)
        self._numel = _coded(shape, _numel).astype(np.float64)[counts]
        self._is_counted = exponents.codes[counts] >= 0
        finite = table["isfinite"].fill_null(True).to_numpy()[counts]
        self.largest = np.zeros(num)
        with np.errstate(invalid="ignore"):
            np.maximum.at(self.largest, self._group, self._high)  # a nan stays
        self.smallest = np.full(num, inf)
        above = self._low > 0
        np.minimum.at(self.smallest, self._group[above], self._low[above])
        self.has_zero = self._any(self._low == 0)
        self.nonfinite = self._any(~finite)

        dtype_codes = dtype.codes[counts]
        dtypes: dict[int, list[str]] = {}
        for pair in np.unique(self._group * len(dtype.values) + dtype_codes).tolist():
            dtypes.setdefault(pair // len(dtype.values), []).append(dtype.values[pair % len(dtype.values)])
        self.lines: list[tuple[str, Part, tuple[str, ...]]] = [
            (
                without_wrappers(module.values[name // 2]),
                ("outputs", "weights")[name % 2],
                tuple(sorted(dtypes[i])),
            )
            for i, name in enumerate(names.tolist())
        ]
        self._histograms = self._histograms_of(dtype, dtype_codes, exponents, exponents.codes[counts])

    def _any(self, which: _Array) -> _Array:
        found: _Array = np.bincount(self._group, which, self.largest.size) > 0
        return found

    def _sum(self, values: _Array) -> _Array:
        return np.bincount(self._group, values, self.largest.size)

    def _histograms_of(
        self, dtype: Strings, dtype_codes: _Array, exponents: Strings, codes: _Array
    ) -> list[list[ExponentHistogram]]:
        """Return for each line the histograms that were recorded, those of one dtype added up."""
        which = self._is_counted
        rows = np.stack([self._group[which], dtype_codes[which], codes[which]], axis=1)
        unique, times = np.unique(rows, axis=0, return_counts=True)
        added: dict[tuple[int, int], dict[int, int]] = {}
        for (line, kind, code), repeats in zip(unique.tolist(), times.tolist(), strict=True):
            into = added.setdefault((line, kind), {})
            for exponent, count in _exponents(exponents.values[code]):
                into[exponent] = into.get(exponent, 0) + count * repeats
        found: list[list[ExponentHistogram]] = [[] for _ in self.lines]
        for (line, kind), counts in added.items():
            found[line].append(ExponentHistogram(getattr(torch, dtype.values[kind]), counts))
        return found

    def holdings(self, name: str) -> list[Holding]:
        """Return what the format makes of each line."""
        ends = edges(name)
        low, least, high = self._low, self._least, self._high
        with np.errstate(invalid="ignore", over="ignore"):
            numel = np.where(self._is_counted | ~(high > 0), 0.0, self._numel)
            # The least and the most elements of each record, by its range.
            overflow = _between(numel, low >= ends.overflows_from, high >= ends.overflows_from)
            zero = _between(numel, high <= ends.zero_up_to, least <= ends.zero_up_to)
            is_one_zero = (low > 0) & (low <= ends.zero_up_to)
            zero = np.maximum(zero[0], np.minimum(is_one_zero, numel)), zero[1]
            subnormal = _between(
                numel,
                (low > ends.zero_up_to) & (high < ends.normal_from),
                (least < ends.normal_from) & (high > ends.zero_up_to),
            )
            overflows = self._any(high >= ends.overflows_from)
            lacks_room = self._any(high * self._room >= ends.overflows_from)
            # Where the share is open, the size of the elements that become zero decides.
            matters = self._any((zero[1] > zero[0]) & (high * NEGLIGIBLE < ends.zero_up_to * self._room))
        total = self._sum(numel)
        shares = [(self._sum(least), self._sum(most)) for least, most in (overflow, zero, subnormal)]
        is_counted = ~self._any(numel > 0)
        found = []
        for i, (module, part, dtypes) in enumerate(self.lines):
            sums = [[float(least[i]), float(most[i])] for least, most in shares]
            elements = float(total[i])
            for histogram in self._histograms[i]:
                fit = would_fit(histogram, name)
                elements += fit.num_elements
                for both, certain, possible in (
                    (sums[0], fit.certain_overflow, fit.num_overflow if overflows[i] else 0),
                    (sums[1], fit.certain_underflow, fit.num_underflow),
                    (sums[2], fit.certain_subnormal, fit.num_subnormal),
                ):
                    both[0] += certain
                    both[1] += possible
            each = [Share(a / elements, b / elements) if elements else Share(0.0, 0.0) for a, b in sums]
            verdict: Verdict = "fits"
            if self.nonfinite[i]:
                verdict = "not finite"
            elif overflows[i]:
                verdict = "overflows"
            elif lacks_room[i]:
                verdict = "no room"
            elif each[1].least > self._lost or (each[1].most > self._lost and matters[i]):
                verdict = "becomes zero"
            found.append(
                Holding(
                    module=module,
                    part=part,
                    dtypes=dtypes,
                    dtype=name,
                    abs_max=float(self.largest[i]),
                    verdict=verdict,
                    overflow=each[0],
                    zero=each[1],
                    subnormal=each[2],
                    is_counted=bool(is_counted[i]),
                )
            )
        return found


def _between(numel: _Array, all_of_it: _Array, some_of_it: _Array) -> tuple[_Array, _Array]:
    """Return the least and the most elements of each record."""
    return np.where(all_of_it, numel, 0.0), np.where(some_of_it, numel, 0.0)


def _numel(shape: str) -> int:
    sizes: tuple[int, ...] = _parsed(shape, "shape", reading.tuple_of(reading.count))
    return min(prod(sizes), _MOST)


def _exponents(counts: str) -> Iterable[tuple[int, int]]:
    """Return the counts by exponent as the trace has them."""
    members: dict[str, int] = _parsed(counts, "exponents", reading.mapping_of(reading.count))
    return [(int(exponent), min(count, _MOST)) for exponent, count in members.items()]


def _parsed(value: str, column: str, reader: reading.Reader[Any]) -> Any:
    try:
        return reader(json.loads(value), column)
    except (ValueError, RecursionError) as error:
        raise unreadable(f"not a row of a trace: {error}") from error


def _coded(column: Strings, of: Any) -> _Array:
    """Return a number for each row by its value; -1 for a row that has none."""
    found: _Array = np.array([int(of(value)) for value in column.values] + [-1], np.int64)[column.codes]
    return found
