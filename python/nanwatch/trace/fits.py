"""Number formats that would hold the outputs and the weights of each module, by the ranges of a whole trace."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

from ..numerics.fit import edges
from ..records.record import EXCUSES
from ..util.messages import without_wrappers
from .trace_file import Trace, ends_of, strings

# The narrowest first, and among formats of one width the more precise one. None is wider than float64, so those behind
# it are judged and never proposed.
FORMATS = (
    *("float8_e4m3fn", "float8_e5m2", "float16", "bfloat16", "float32", "float64"),
    *("float8_e4m3fnuz", "float8_e5m2fnuz"),
)
Part: TypeAlias = Literal["outputs", "weights"]
Verdict: TypeAlias = Literal["fits", "overflows", "no room", "becomes zero", "not finite"]
_PARTS: dict[str, Part] = {"output": "outputs", "weight": "weights", "buffer": "weights"}
# An element that becomes zero has to be less than this part of the largest element of its tensor: float16 itself rounds
# off as much.
NEGLIGIBLE = 2.0**-12
MARGINS = (0.0, 1000.0)  # bits; 2^1000 is still a normal float64
_Array: TypeAlias = "np.ndarray[Any, Any]"


@dataclass(frozen=True, slots=True)
class Need:
    """The outputs, or the weights and buffers, of one module over a trace, and whether formats hold them.

    A verdict is "fits", or why the format does not: something "overflows", or would with the margin ("no room"),
    "becomes zero" though it matters beside the largest element of its tensor, or is "not finite" as it is. `abs_max` is
    the largest magnitude; `abs_min` the smallest that is not zero among the smallest magnitudes of the records, None
    when each was zero.
    """

    module: str
    part: Part
    dtypes: tuple[str, ...]
    abs_min: float | None
    abs_max: float
    verdicts: Mapping[str, Verdict]

    @property
    def fits(self) -> str | None:
        """Return the narrowest of FORMATS that fits."""
        return next((name for name in FORMATS if self.verdicts[name] == "fits"), None)


def fits(trace: Trace | str | os.PathLike[str], margin_bits: float = 1.0) -> tuple[Need, ...]:
    """Return a Need for the outputs and one for the weights of each module, in the order in which they were first seen.

    `margin_bits` are left free at both ends of a format: with 1 the values may still double. Integers and bools, masks,
    and infinities that are allowed do not count. Raises ValueError for a margin outside 0 to 1000.
    """
    if not MARGINS[0] <= margin_bits <= MARGINS[1]:
        raise ValueError(f"margin_bits is {margin_bits!r}; accepted are 0 to {MARGINS[1]:g} bits")
    trace = trace if isinstance(trace, Trace) else Trace.open(trace)
    table = trace.table(("dtype", "module", "role", "abs_min", "abs_max", "isfinite", "note"))
    modules, roles, dtypes, notes = (strings(table[name]) for name in ("module", "role", "dtype", "note"))
    is_part, is_excused = roles.each(_PARTS.__contains__), notes.each(EXCUSES.__contains__)
    ends = ends_of(table)
    counts = is_part & ~is_excused & ~np.isnan(ends.largest) & ~table["abs_max"].is_null().to_numpy()
    finite = table["isfinite"].fill_null(True).to_numpy()
    columns = (table["abs_min"].to_numpy(), table["abs_max"].to_numpy(), ends.smallest_subnormal, finite)
    numbers = np.stack(columns, 1).astype(np.float64)[counts]
    groups: dict[tuple[str, Part], list[int]] = {}
    for i, (module, role) in enumerate(zip(modules.codes[counts], roles.codes[counts], strict=True)):
        groups.setdefault((modules.values[module], _PARTS[roles.values[role]]), []).append(i)
    names = [dtypes.values[code] for code in dtypes.codes[counts]]
    return tuple(
        _need(module, part, {names[i] for i in rows}, numbers[rows], margin_bits)
        for (module, part), rows in groups.items()
    )


def _need(module: str, part: Part, dtypes: set[str], numbers: _Array, margin_bits: float) -> Need:
    """Return the Need of some records: abs_min, abs_max, the format's smallest number, whether it is finite."""
    low, high, smallest, finite = numbers.T
    room = 2.0**margin_bits
    # A tensor that holds a zero may hold its format's smallest number too.
    least = np.where(low > 0, low, smallest)
    abs_max = float(high.max())
    above_zero = low[low > 0]
    abs_min = float(above_zero.min()) if len(above_zero) else None
    verdicts: dict[str, Verdict] = {}
    for name in FORMATS:
        limits = edges(name)
        is_lost = (high > 0) & (least <= limits.zero_up_to) & (high * NEGLIGIBLE < limits.zero_up_to * room)
        if not finite.all():
            verdicts[name] = "not finite"
        elif abs_max >= limits.overflows_from:
            verdicts[name] = "overflows"
        elif abs_max * room >= limits.overflows_from:
            verdicts[name] = "no room"
        else:
            verdicts[name] = "becomes zero" if is_lost.any() else "fits"
    return Need(without_wrappers(module), part, tuple(sorted(dtypes)), abs_min, abs_max, verdicts)
