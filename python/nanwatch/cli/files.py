"""`nanwatch show`, `nanwatch diff`, `nanwatch formats` and `nanwatch merge`: commands that read the files of runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..blackbox.box_file import SUFFIX
from ..distributed.merge import merge
from ..distributed.merge_pages import document, merged_html, merged_text
from ..report.forms import forms
from ..report.report import Report
from ..report.spike import SpikeReport, read_saved
from ..trace.comparison import RTOL, diff
from ..trace.difference import KINDS
from ..trace.format_advice import FORMATS, LOST, Holding, Need, Share, fits, holdings
from ..trace.picture import draw
from ..trace.trace_file import Trace, batch_words
from ..util import reading
from ..util.progress import Tell
from ..util.reading import plain
from ..util.visible import module_name, visible
from .blackbox import main as blackbox_main
from .commands import answered, below, command_parser, rendered, write_page

_MOST_LINES = 10
_SHOW = """\
exit status: 0, or 2 when there is nothing to show

examples:
  nanwatch show run.parquet                      the latest batch
  nanwatch show run.parquet --html run.html      a page with a heat map of the whole run
  nanwatch show run.parquet --batch 149 --html batch.html
  nanwatch show out                              the newest report of the folder that watch(output_dir="out") wrote
"""
_DIFF = """\
exit status: 1 when they differ, 0 when they do not, 2 when they cannot be compared

examples:
  nanwatch diff before.parquet after.parquet
  nanwatch diff run.parquet --batches 149 150
  nanwatch diff fp32.parquet fp16.parquet --ignore dtype --rtol 0.05
  nanwatch diff before.parquet after.parquet --html diff.html --json
"""
_FORMATS = """\
A format "fits" when nothing overflows in it, though the largest value doubles once for each bit of the margin, and at
most the share --lost of the elements becomes zero. It "holds all" when, with the margin at both ends, nothing overflows
and nothing is below its smallest normal number: one small element decides.

The ranges of a trace say whether an element overflows and whether one becomes zero, but not how many do. By ranges a
format fits when each element that may become zero is below 1/4096 of the largest element of its tensor. A trace of a
few batches with counts=True (nanwatch run --counts --trace ...) has the shares.

exit status: 0, 1 when the format of --for does not fit, or 2 when there is no trace to read

examples:
  nanwatch formats run.parquet --for float16
  nanwatch formats run.parquet --for float16 --lost 0.05 --json
  nanwatch formats run.parquet --margin-bits 3
"""
_MERGE = """\
exit status: 0 when all is finite, 1 when a rank has a finding, 2 when there is nothing to read

examples:
  nanwatch merge run                the folder that watch(output_dir="run") wrote on all ranks
  nanwatch merge run --html merged.html
  nanwatch merge run --attempt 0    of an elastic job that was restarted: its first attempt
  nanwatch merge run --json > job.json
"""


def show_main(arguments: list[str]) -> int:
    """Run `nanwatch show` and return the exit status."""
    parser = command_parser(
        "show", "Print the frames of one batch of a trace, or a report that was saved as JSON.", _SHOW
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        type=Path,
        help="a trace, the report.json of a failure or a spike, its folder, the folder of several, or a black box",
    )
    parser.add_argument(
        "--format",
        choices=sorted(forms()),
        default="text",
        help="form of the report on stdout (default: %(default)s)",
    )
    parser.add_argument("--batch", type=int, metavar="N", help="of a trace: this batch (default: the latest)")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="PAGE",
        help="write a page in place of the text: the report, or of a trace without --batch a heat map of the run",
    )
    options = parser.parse_args(arguments)
    if options.file.suffix == SUFFIX:
        if options.format not in ("text", "json"):
            parser.error(
                f"--format {options.format}: a black box has the forms text and json, and --html PAGE"
            )
        page = () if options.html is None else ("--html", str(options.html))
        is_json = options.json or options.format == "json"
        return blackbox_main([str(options.file), *page, *(("--json",) if is_json else ())])

    def find(tell: Tell) -> tuple[str, int]:
        file = _newest_report(options.file)
        trace = None if _is_json(file) else Trace.open(file, tell)
        report, heading = _report_of(file, trace, options.batch, tell)
        if file.parent.parent == options.file:  # one of several
            heading = [f"{file}:", "", *heading]
        run = trace if options.batch is None else None
        page = (
            (lambda: forms()["html"].render(report, tell)) if run is None else (lambda: draw(run).to_html())
        )
        wrote = write_page(options.html, page, tell)
        form = forms()["json" if options.json else options.format]
        if form.name != "text":
            return form.render(report, tell), 0
        return "\n".join([*map(visible, heading), wrote or form.render(report, tell)]), 0

    return answered("show", find)


def _report_of(
    file: Path, trace: Trace | None, batch: int | None, tell: Tell
) -> tuple[Report | SpikeReport, list[str]]:
    """Return the report, and the lines above it."""
    if trace is None:
        if batch is not None:
            raise ValueError(f"--batch is for a trace, and {file} is a report; leave it out")
        tell(f"reading {file.name}")
        return read_saved(reading.file_text(file)), []
    if not trace.batches:
        raise ValueError(f"{trace.path} has no batch")
    heading = [f"{trace.path}: {batch_words(trace.batches)}, rank {trace.rank}"]
    if trace.lost_frames:
        heading[0] += f", {trace.lost_frames:,} frames lost"
    return trace.report(trace.batches[-1] if batch is None else batch), [*heading, ""]


def _newest_report(path: Path) -> Path:
    """Return the report in the folder of a failure, else the newest in the folders below, else the path itself."""
    for pattern in ("report.json", "*/report.json"):
        if reports := sorted(path.glob(pattern), key=lambda file: (file.stat().st_mtime_ns, file)):
            return reports[-1]
    return path


def _is_json(file: Path) -> bool:
    if not file.is_file():
        return False
    with file.open("rb") as opened:
        return opened.read(64).lstrip()[:1] == b"{"


def diff_main(arguments: list[str]) -> int:
    """Run `nanwatch diff` and return the exit status."""
    parser = command_parser(
        "diff",
        "Name the first record in which two traces part, and what grew most from the one to the other.",
        _DIFF,
    )
    parser.add_argument("a", metavar="A", help="a trace: what watch(trace=...) was given")
    parser.add_argument(
        "b", metavar="B", nargs="?", help="another; without it --batches compares two batches of A"
    )
    parser.add_argument(
        "--batches", nargs=2, type=int, metavar=("N", "M"), help="batch N of A against batch M of B"
    )
    parser.add_argument(
        "--rtol",
        type=float,
        default=RTOL,
        help="relative difference of ranges that is equal (default: %(default)g)",
    )
    parser.add_argument(
        "--ignore",
        nargs="+",
        action="extend",
        default=[],
        choices=KINDS,
        help="kinds of difference to pass over",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with charts too")
    options = parser.parse_args(arguments)

    def find(tell: Tell) -> tuple[str, int]:
        batches = None if options.batches is None else (options.batches[0], options.batches[1])
        one = Trace.open(options.a, tell)
        other = None if options.b is None else Trace.open(options.b, tell)
        found = diff(one, other, batches=batches, rtol=options.rtol, ignore=options.ignore)
        return rendered(found, options, tell), int(found.differs)

    return answered("diff", find)


def merge_main(arguments: list[str]) -> int:
    """Run `nanwatch merge` and return the exit status."""
    parser = command_parser(
        "merge",
        "One report from those of several ranks: the origin, headroom by module and rank, and weights"
        " that should be alike and are not.",
        _MERGE,
    )
    parser.add_argument(
        "paths",
        metavar="PATH",
        type=Path,
        nargs="+",
        help="a folder with the ranks' folders in it, or a report",
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with a heat map too")
    parser.add_argument(
        "--attempt",
        metavar="N",
        help="of a job that torchrun restarted: merge the attempt after N restarts, as N or RUN_ID/N"
        " (default: the latest with a finding)",
    )
    options = parser.parse_args(arguments)

    def find(tell: Tell) -> tuple[str, int]:
        merged = merge(*options.paths, attempt=options.attempt, tell=tell)
        wrote = write_page(options.html, lambda: merged_html(merged), tell)
        tell("comparing the ranks")
        found = json.dumps(document(merged), indent=2) if options.json else below(merged_text(merged), wrote)
        return found, int(bool(merged.failed))

    return answered("merge", find)


def formats_main(arguments: list[str]) -> int:
    """Run `nanwatch formats` and return the exit status."""
    parser = command_parser(
        "formats",
        "Tell whether a format fits what a model computed, and name the narrowest that fits each module.",
        _FORMATS,
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
            " counts=True has the shares: nanwatch run --counts --trace ...",
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
