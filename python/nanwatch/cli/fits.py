"""`nanwatch fits`: which number formats hold what a run computed, by its trace."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

from ..trace.fits import FORMATS, Need, fits
from ..trace.trace_file import Trace
from ..util.progress import Tell
from ..util.reading import plain
from ..util.visible import module_name, visible
from .commands import answered, command_parser

_HELP = """\
A format "fits" when nothing overflows in it, though the largest value doubles once for each bit of the margin, and each
element that may become zero is below 1/4096 of the largest element of its tensor. Values are judged as they are:
neither the scale of a loss nor that of a float8 recipe is counted.

exit status: 0, 1 when the format of --for does not fit, or 2 when there is no trace to read

examples:
  nanwatch fits run.parquet --for float16
  nanwatch fits run.parquet --margin-bits 3 --json
"""


def main(arguments: list[str]) -> int:
    """Run `nanwatch fits` and return the exit status."""
    parser = command_parser(
        "fits",
        "Tell whether a format fits what a model computed, and name the narrowest that fits each module.",
        _HELP,
    )
    parser.add_argument("trace", metavar="TRACE", help="a trace: what watch(trace=...) was given")
    parser.add_argument(
        "--for",
        dest="format",
        choices=FORMATS,
        metavar="FORMAT",
        help=f"tell whether this format fits, and where it does not: {', '.join(FORMATS)}",
    )
    parser.add_argument(
        "--margin-bits",
        type=float,
        default=1.0,
        metavar="BITS",
        help="room to leave, in doublings of the largest value (default: %(default)g)",
    )

    def find(options: argparse.Namespace, tell: Tell) -> tuple[str, int]:
        margin_bits, name = options.margin_bits, options.format
        needs = fits(Trace.open(options.trace, tell), margin_bits)
        answer: dict[str, Any] = {"margin_bits": margin_bits}
        bad = [need for need in needs if name is not None and need.verdicts[name] != "fits"]
        if name is not None:
            answer = {"format": name, "fits": not bad, **answer}
        if options.json:
            modules = [{**plain(need), "fits": need.fits} for need in needs]
            return json.dumps({**answer, "modules": modules}, allow_nan=False, indent=2), int(bool(bad))
        if not needs:
            lines = ["No output or weight of floating point was read in this trace."]
        elif name is None:
            lines = _narrowest(needs, margin_bits)
        else:
            lines = _verdicts(needs, bad, name, margin_bits)
        return "\n".join(map(visible, lines)), int(bool(bad))

    return answered(parser, arguments, find)


def _narrowest(needs: tuple[Need, ...], margin_bits: float) -> list[str]:
    wide = max(map(len, FORMATS))
    lines = [f"{'least > 0':>9} {'largest':>8}  {'fits':<{wide}}  module"]
    for need in needs:
        least = "-" if need.abs_min is None else f"{need.abs_min:.2e}"
        lines.append(f"{least:>9} {need.abs_max:8.2e}  {need.fits or 'none':<{wide}}  {_of(need)}")
    counts = Counter(need.fits for need in needs)
    listed = ", ".join(f"{name or 'none'} {counts[name]}" for name in (*FORMATS, None) if counts[name])
    return [*lines, "", f"Narrowest that fits {2**margin_bits:g} times these values: {listed}."]


def _verdicts(needs: tuple[Need, ...], bad: list[Need], name: str, margin_bits: float) -> list[str]:
    if not bad:
        return [
            f"{name}: fits all {len(needs)} outputs and weights of modules. Nothing overflows, even"
            f" {2**margin_bits:g} times as large."
        ]
    head = f"{name}: does not fit {len(bad)} of {len(needs)} outputs and weights of modules."
    rows = [f"{need.abs_max:8.2e}  {need.verdicts[name]:<12}  {_of(need)}" for need in bad]
    return [head, "", f"{'largest':>8}  {'verdict':<12}  module", *rows]


def _of(need: Need) -> str:
    return f"{module_name(need.module)} ({need.part}, {', '.join(need.dtypes)})"
