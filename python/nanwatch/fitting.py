"""The narrowest format that would hold what a module makes and owns, by the ranges of a whole trace."""

from __future__ import annotations

import os
from dataclasses import dataclass
from math import inf
from typing import Any, Literal, TypeAlias

import numpy as np

from .fit import check_margin, narrowest
from .formats import limits
from .text import without_wrappers
from .trace_file import Trace, strings

# The narrowest first; of those of one width the more precise one.
FORMATS = ("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32")
Part: TypeAlias = Literal["outputs", "weights"]
_PARTS: dict[str, Part] = {"output": "outputs", "weight": "weights", "buffer": "weights"}


@dataclass(frozen=True, slots=True)
class Need:
    """The outputs, or the weights and buffers, of one module over a trace.

    `abs_max` is the largest magnitude; `abs_min` the smallest that is not zero among the smallest magnitudes of the
    records, None when each was zero: then what is smallest above zero is not known. `holds_all` is the narrowest of
    FORMATS in which neither overflows or falls below the normal numbers, `holds_largest` the narrowest in which
    `abs_max` does not overflow; None where there is none, as with a nan or an inf. `has_zero`: a record had a zero.
    """

    module: str
    part: Part
    dtypes: tuple[str, ...]
    abs_min: float | None
    abs_max: float
    isfinite: bool
    has_zero: bool
    holds_all: str | None
    holds_largest: str | None


def fits(trace: Trace | str | os.PathLike[str], margin_bits: float = 1.0) -> tuple[Need, ...]:
    """A Need for the outputs and one for the weights of each module, in the order in which they were first seen.

    `margin_bits` are left free at both ends of a format: with 1 the values may still double. Integers and bools, masks,
    and infinities that are allowed do not count. ValueError for a margin below 0 or above 1000.
    """
    check_margin(margin_bits)
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
            Need(
                module=without_wrappers(module.values[int(names[i]) // 2]),
                part=("outputs", "weights")[int(names[i]) % 2],
                dtypes=tuple(sorted(dtypes[i])),
                abs_min=least,
                abs_max=most,
                isfinite=good,
                has_zero=bool(zero[i]),
                holds_all=_narrowest(least, most, margin_bits) if good else None,
                holds_largest=_narrowest(None, most, margin_bits) if good else None,
            )
        )
    return tuple(found)


def _narrowest(abs_min: float | None, abs_max: float, margin_bits: float) -> str | None:
    return narrowest((abs_min or 0.0, abs_max), margin_bits=margin_bits, subnormals=False, formats=FORMATS)


def _coded(values: tuple[str, ...], of: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Something of each value by its code; -1 for the code -1."""
    return np.array([int(of(value)) for value in values] + [-1], np.int64)
