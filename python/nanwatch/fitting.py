"""The narrowest format that would hold what a module makes and owns, by the ranges of a whole trace."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, TypeAlias

import numpy as np

from .headroom import limits
from .text import without_wrappers
from .trace_file import Trace, strings

# The narrowest first; of those of one width the more precise one.
FORMATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32")
NONE = "none"
# Beyond 2^1000 every format is left, and a factor of 2^1024 is no float.
MAX_MARGIN_BITS = 1000
Part: TypeAlias = Literal["outputs", "weights"]
_PARTS: dict[str, Part] = {"output": "outputs", "weight": "weights", "buffer": "weights"}


@dataclass(frozen=True, slots=True)
class Fit:
    """The outputs, or the weights and buffers, of one module over a trace.

    `abs_max` is the largest magnitude; `abs_min` the smallest that is not zero among the smallest magnitudes of the
    records, None when each was zero: then what is smallest above zero is not known. `holds_all` is the narrowest of
    FORMATS whose normal numbers span both, `holds_largest` the narrowest that spans `abs_max`, so that what is small
    may lose precision or become zero; "none" where none does, as with a nan or an inf. `has_zero`: a record had a zero.
    """

    module: str
    part: Part
    dtypes: tuple[str, ...]
    abs_min: float | None
    abs_max: float
    isfinite: bool
    has_zero: bool
    holds_all: str
    holds_largest: str


def fits(trace: Trace | str | os.PathLike[str], margin_bits: float = 1.0) -> tuple[Fit, ...]:
    """A Fit for the outputs and one for the weights of each module, in the order in which they were first seen.

    `margin_bits` are left free at both ends of a format: with 1 the values may still double. Integers and bools, masks,
    and infinities that are allowed do not count. ValueError for a margin below 0 or above 1000.
    """
    if not 0 <= margin_bits <= MAX_MARGIN_BITS:
        raise ValueError(f"margin_bits should be from 0 to {MAX_MARGIN_BITS}, got {margin_bits!r}")
    source = trace if isinstance(trace, Trace) else Trace.open(trace)
    table = source.table(["module", "role", "dtype", "abs_min", "abs_max", "isfinite", "note"])
    role, dtype, note = (strings(table[name]) for name in ("role", "dtype", "note"))
    module = strings(table["module"])
    low, high = table["abs_min"].to_numpy(), table["abs_max"].to_numpy()
    finite = table["isfinite"].fill_null(True).to_numpy()

    part = _coded(
        role.values, lambda value: ("outputs", "weights").index(_PARTS[value]) if value in _PARTS else -1
    )
    is_float = _coded(dtype.values, lambda value: limits(value) is not None)
    excused = _coded(note.values, lambda value: value in ("mask", "allowed inf"))
    counts = (part[role.codes] >= 0) & (is_float[dtype.codes] > 0) & (excused[note.codes] <= 0)
    counts &= ~table["abs_max"].is_null().to_numpy()
    if not counts.any():
        return ()
    groups = (module.codes.astype(np.int64) * 2 + part[role.codes])[counts]
    names, first, group = np.unique(groups, return_index=True, return_inverse=True)
    low, high, finite, codes = low[counts], high[counts], finite[counts], dtype.codes[counts]
    largest = np.zeros(len(names))
    with np.errstate(invalid="ignore"):
        np.maximum.at(largest, group, high)  # a nan stays
    smallest = np.full(len(names), inf)
    above = low > 0
    np.minimum.at(smallest, group[above], low[above])
    zero = np.bincount(group, low == 0, len(names)) > 0
    bad = np.bincount(group, ~finite, len(names)) > 0
    dtypes: dict[int, list[str]] = {}
    for pair in np.unique(group.astype(np.int64) * len(dtype.values) + codes).tolist():
        dtypes.setdefault(pair // len(dtype.values), []).append(dtype.values[pair % len(dtype.values)])
    found = []
    for i in np.argsort(first).tolist():
        least = None if smallest[i] == inf else float(smallest[i])
        most, good = float(largest[i]), not bad[i]
        found.append(
            Fit(
                module=without_wrappers(module.values[int(names[i]) // 2]),
                part=("outputs", "weights")[int(names[i]) % 2],
                dtypes=tuple(sorted(dtypes[i])),
                abs_min=least,
                abs_max=most,
                isfinite=good,
                has_zero=bool(zero[i]),
                holds_all=narrowest(least, most, margin_bits) if good else NONE,
                holds_largest=narrowest(None, most, margin_bits) if good else NONE,
            )
        )
    return tuple(found)


def narrowest(abs_min: float | None, abs_max: float, margin_bits: float) -> str:
    """The narrowest of FORMATS that holds both with the margin; "none" where none does."""
    factor = 2.0**margin_bits
    for name in FORMATS:
        ends = limits(name)
        if ends is None or abs_max > ends.largest / factor:
            continue
        if abs_min is None or abs_min >= ends.smallest_normal * factor:
            return name
    return NONE


def _coded(values: tuple[str, ...], of: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Something of each value by its code; -1 for the code -1."""
    return np.array([int(of(value)) for value in values] + [-1], np.int64)
