"""`nanwatch top` and `nanwatch fits`: the modules of a trace by headroom, and the formats that hold what they made."""

from __future__ import annotations

import argparse
import json
import math
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from ..report.page import bits_words
from ..trace.fits import FORMATS, Need, fits
from ..trace.picture import Row, draw, trend_words
from ..trace.trace_file import Trace
from ..util.progress import Tell
from ..util.reading import plain
from ..util.visible import module_name, visible
from .commands import answered, command_parser
from .files import latest_batches, trace_line

_LATEST = 200  # batches; in a trace of 1,000,000 rows and 5,000 batches they take 0.1 s
_LINES = 20
_MARKS = 3  # the latest spikes and forecasts that are shown
_COLUMNS = ("headroom", "bits/100", "batch", "abs max", "failed", "module")
_TOP = """\
headroom is in bits, each a doubling that the largest element has left. bits/100 is its trend over 100 batches. batch
and abs max are those of the least headroom, and failed counts batches with a non-finite value. Above the table stand
the latest spikes and forecasts.

On a terminal the table is made again every 2 s until Ctrl-C, but not with --once or --json.

exit status: 0, or 2 when there is nothing to show

examples:
  nanwatch top run.parquet
  nanwatch top run.parquet --once --by trend
"""


def top_main(arguments: list[str]) -> int:
    """Run `nanwatch top` and return the exit status."""
    parser = command_parser("top", "Show the modules of a running trace by least headroom or by trend.", _TOP)
    parser.add_argument("run", metavar="RUN", type=Path, help="a trace: what watch(trace=...) was given")
    parser.add_argument("--once", action="store_true", help="print one table and end")
    parser.add_argument("--by", choices=("headroom", "trend"), default="headroom", help="what comes first")
    parser.set_defaults(live=2)
    return answered(parser, arguments, _top)


def _top(options: argparse.Namespace, tell: Tell) -> tuple[str, int]:
    trace = Trace.open(options.run, tell)
    picture = draw(trace, latest_batches(trace, _LATEST))
    rows = list(picture.rows)  # by headroom
    if options.by == "trend":  # modules without one come last
        rows.sort(key=lambda row: (math.isnan(row.trend), row.trend))
    if options.json:
        document = {
            "trace": str(picture.path),
            "rank": picture.rank,
            "lost_frames": picture.lost_frames,
            "batches": [picture.batches[0][0], picture.batches[-1][0]],  # the first and the last of them
            "modules": [plain(row) for row in rows],
            "marks": [plain(mark) for mark in picture.marks],
        }
        return json.dumps(document, allow_nan=False, indent=2), 0
    shown_batches = f"; below are the latest {_LATEST:,}" if len(trace.batches) > _LATEST else ""
    heading = [trace_line(trace) + shown_batches]
    for mark in picture.marks[-_MARKS:]:
        heading.append(mark.text if mark.kind == "spike" else f"batch {mark.batch}: {mark.text}")
    room = shutil.get_terminal_size((80, _LINES + 10)).lines - len(heading) - 3
    shown = rows[: max(min(_LINES, room), 1)]
    more = [f"{len(rows) - len(shown):,} modules more"] if len(rows) > len(shown) else []
    return "\n".join(map(visible, [*heading, *_table(shown), *more])), 0


def _table(rows: list[Row]) -> list[str]:
    """Return a line of headings and one for each row."""
    cells = [
        (bits_words(row.bits), trend_words(row.trend), str(row.batch), f"{row.abs_max:.2e}",
         str(row.num_failed or ""), row.place)
        for row in rows
    ]  # fmt: skip
    return ["  ".join([f"{cell:>9}" for cell in line[:-1]]) + f"  {line[-1]}" for line in (_COLUMNS, *cells)]


_FITS = """\
A format "fits" when nothing overflows in it, though the largest value doubles once for each bit of the margin, and each
element that may become zero is below 1/4096 of the largest element of its tensor. Values are judged as they are:
neither the scale of a loss nor that of a float8 recipe is counted.

exit status: 0, 1 when the format of --for does not fit, or 2 when there is no trace to read

examples:
  nanwatch fits run.parquet --for float16
  nanwatch fits run.parquet --margin-bits 3 --json
"""


def fits_main(arguments: list[str]) -> int:
    """Run `nanwatch fits` and return the exit status."""
    parser = command_parser(
        "fits",
        "Tell whether a format fits what a model computed, and name the narrowest that fits each module.",
        _FITS,
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
