"""`nanwatch formats TRACE`: the narrowest format that holds each module's outputs and weights."""

from __future__ import annotations

import argparse
import json
import sys
from math import isfinite
from typing import Any

from ._commands import command_parser
from .fitting import FORMATS, Need, fits
from .progress import shown
from .text import module_name
from .trace_file import Trace

_FAILED = 2
_EXAMPLES = """\
A format "holds all" when, with the margin at both ends, the largest magnitude does not overflow in it and the smallest
above zero is a normal number of it. It "holds largest" when only the largest fits: what is small loses precision there
or becomes zero.
What a trace cannot say: the smallest magnitude above zero of a tensor that has a zero, marked ~.

exit status: 0, or 2 when there is no trace to read

examples:
  nanwatch formats run.parquet
  nanwatch formats run.parquet --margin-bits 3 --json
"""


def main(arguments: list[str]) -> int:
    """Runs the command; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        with shown() as tell:
            found = fits(Trace.open(options.trace, tell), options.margin_bits)
    except (ValueError, OSError, ImportError) as error:
        print(f"nanwatch formats: {error}", file=sys.stderr)
        return _FAILED
    if options.json:
        print(json.dumps(_document(found, options.margin_bits), allow_nan=False, indent=2))
    else:
        print("\n".join(_lines(found, options.margin_bits)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = command_parser(
        "formats",
        "Name, for each module's outputs and weights, the narrowest format that holds all their values.",
        _EXAMPLES,
    )
    parser.add_argument("trace", metavar="TRACE", help="a trace: what watch(trace=...) was given")
    parser.add_argument(
        "--margin-bits",
        type=float,
        default=1.0,
        metavar="BITS",
        help="room to leave at both ends, in doublings (default: %(default)g)",
    )
    return parser


def _lines(found: tuple[Need, ...], margin_bits: float) -> list[str]:
    if not found:
        return ["No output or weight of floating point was read in this trace."]
    wide = max(map(len, FORMATS))
    lines = [f"{'abs min':>9} {'abs max':>8}  {'holds all':<{wide}}  {'holds largest':<{wide}}  of"]
    for one in found:
        least = "-" if one.abs_min is None else f"{one.abs_min:.2e}"
        lines.append(
            f"{'~' if one.has_zero else ''}{least:>{8 if one.has_zero else 9}} {one.abs_max:8.2e}"
            f"  {one.holds_all or 'none':<{wide}}  {one.holds_largest or 'none':<{wide}}"
            f"  {one.part} of {module_name(one.module)} ({', '.join(one.dtypes)})"
        )
    counts = {name: sum(one.holds_all == name for one in found) for name in (*FORMATS, None)}
    shown = ", ".join(f"{name or 'none'} {count}" for name, count in counts.items() if count)
    return [
        *lines,
        "",
        f"Narrowest that holds all, with {margin_bits:g} bits to spare at both ends: {shown}.",
    ]


def _document(found: tuple[Need, ...], margin_bits: float) -> dict[str, Any]:
    return {
        "margin_bits": margin_bits,
        "modules": [
            {
                "module": one.module,
                "part": one.part,
                "dtypes": list(one.dtypes),
                "abs_min": one.abs_min,
                "abs_max": one.abs_max if isfinite(one.abs_max) else str(one.abs_max),
                "isfinite": one.isfinite,
                "has_zero": one.has_zero,
                "holds_all": one.holds_all,
                "holds_largest": one.holds_largest,
            }
            for one in found
        ],
    }
