"""`nanwatch formats`: which number formats hold what a run computed, by its trace."""

from __future__ import annotations

import json
from typing import Any

from ..trace.format_advice import FORMATS, LOST, Holding, Need, Share, fits, holdings
from ..trace.trace_file import Trace
from ..util.progress import Tell
from ..util.reading import plain
from ..util.visible import module_name, visible
from .commands import answered, command_parser

_MOST_LINES = 10
_HELP = """\
A format "fits" when nothing overflows in it, though the largest value doubles once for each bit of the margin, and at
most the share --lost of the elements becomes zero. It "holds all" when, with the margin at both ends, nothing overflows
and nothing is below its smallest normal number: one small element decides.

The ranges of a trace say whether an element overflows and whether one becomes zero, but not how many do. By ranges a
format fits when each element that may become zero is below 1/4096 of the largest element of its tensor. A trace of a
few batches with counts (nanwatch run --trace run.parquet,counts ...) has the shares.

exit status: 0, 1 when the format of --for does not fit, or 2 when there is no trace to read

examples:
  nanwatch formats run.parquet --for float16
  nanwatch formats run.parquet --for float16 --lost 0.05 --json
  nanwatch formats run.parquet --margin-bits 3
"""


def main(arguments: list[str]) -> int:
    """Run `nanwatch formats` and return the exit status."""
    parser = command_parser(
        "formats",
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
        "--lost",
        type=float,
        default=LOST,
        metavar="SHARE",
        help="how large a share of a module's elements may become zero (default: %(default)g)",
    )
    parser.add_argument(
        "--margin-bits",
        type=float,
        default=1.0,
        metavar="BITS",
        help="room to leave, in doublings of the largest value (default: %(default)g)",
    )
    options = parser.parse_args(arguments)
    margin_bits, lost, name = options.margin_bits, options.lost, options.format

    def find(tell: Tell) -> tuple[str, int]:
        trace = Trace.open(options.trace, tell)
        answer: dict[str, Any] = {"margin_bits": margin_bits, "lost": lost}
        status = 0
        if name is None:
            needs = fits(trace, margin_bits, lost)
            lines, modules = _fits_lines(needs, margin_bits), list(map(plain, needs))
        else:
            held = holdings(trace, name, margin_bits, lost)
            lines, modules = _holdings_lines(held, name, margin_bits), list(map(_holding, held))
            fit = all(one.fits for one in held)
            answer, status = {"format": name, "fits": fit, **answer}, int(not fit)
        if options.json:
            return json.dumps({**answer, "modules": modules}, allow_nan=False, indent=2), status
        return "\n".join(map(visible, lines)), status

    return answered("formats", find)


_NOTHING = "No output or weight of floating point was read in this trace."


def _fits_lines(found: tuple[Need, ...], margin_bits: float) -> list[str]:
    if not found:
        return [_NOTHING]
    wide = max(map(len, FORMATS))
    lines = [f"{'abs min':>9} {'abs max':>8}  {'fits':<{wide}}  {'holds all':<{wide}}  of"]
    for one in found:
        least = "-" if one.abs_min is None else f"{one.abs_min:.2e}"
        lines.append(
            f"{'~' if one.has_zero else ''}{least:>{8 if one.has_zero else 9}} {one.abs_max:8.2e}"
            f"  {one.fits or 'none':<{wide}}  {one.holds_all or 'none':<{wide}}  {_of(one)}"
        )
    counts = {name: sum(one.fits == name for one in found) for name in (*FORMATS, None)}
    shown = ", ".join(f"{name or 'none'} {count}" for name, count in counts.items() if count)
    return [*lines, "", f"Narrowest that fits, with {_bits(margin_bits)} to spare: {shown}."]


def _holdings_lines(found: tuple[Holding, ...], name: str, margin_bits: float) -> list[str]:
    if not found:
        return [_NOTHING]
    bad = [one for one in found if not one.fits]
    lossy = sorted((one for one in found if one.fits and one.zero.most), key=lambda one: -one.zero.most)
    open_lines = [one for one in found if one.zero.most > one.zero.least and not one.is_counted]
    if bad:
        head = f"{name}: does not fit {len(bad)} of {len(found)} outputs and weights of modules."
    else:
        head = (
            f"{name}: fits all {len(found)} outputs and weights of modules. Nothing overflows, with"
            f" {_bits(margin_bits)} to spare."
        )
    lines = [head]
    shown = bad + lossy[: _MOST_LINES if bad or len(lossy) > _MOST_LINES else None]
    if shown:
        lines += [
            "",
            f"{'overflow':>12} {'become zero':>12} {'subnormal':>12} {'abs max':>8}  {'verdict':<12}  of",
        ]
    lines += [
        f"{_share(one.overflow, one):>12} {_share(one.zero, one):>12} {_share(one.subnormal, one):>12}"
        f" {one.abs_max:8.2e}  {one.verdict:<12}  {_of(one)}"
        for one in shown
    ]
    if left := len(bad) + len(lossy) - len(shown):
        lines.append(f"and {left} more that fit, of which some elements become zero (--json has them all)")
    if open_lines:
        lines += [
            "",
            f'Of {len(open_lines)} the trace does not say how many elements become zero ("some": at least one, "?":'
            " perhaps none). They fit where each is less than 1/4096 of the largest of its tensor. A trace with"
            " counts has the shares: nanwatch run --trace run.parquet,counts ...",
        ]
    return lines


def _share(share: Share, of: Holding) -> str:
    least, most = share
    if most == 0:
        return "none"
    if not of.is_counted:
        return "all" if least == 1 else "some" if least else "?"
    return f"{'<= ' if most > least else ''}{100 * most:.2g} %"


def _of(one: Need | Holding) -> str:
    return f"{one.part} of {module_name(one.module)} ({', '.join(one.dtypes)})"


def _bits(margin: float) -> str:
    return f"{margin:g} bit{'' if margin == 1 else 's'}"


def _holding(one: Holding) -> dict[str, Any]:
    return {
        "module": one.module,
        "part": one.part,
        "dtypes": list(one.dtypes),
        "abs_max": plain(one.abs_max),
        "fits": one.fits,
        "verdict": one.verdict,
        "overflow": list(one.overflow),
        "become_zero": list(one.zero),
        "subnormal": list(one.subnormal),
        "is_counted": one.is_counted,
    }
