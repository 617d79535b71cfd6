"""`nanwatch show`, `top`, `fits` and `scan`: the commands that read the files of runs."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..blackbox.process import state_folder
from ..blackbox.reader import SUFFIX, read_job
from ..capsule.capsule import FILE
from ..ranks.merge import merge
from ..records.fields import plain
from ..report.events import SpikeReport
from ..report.page import bits_words
from ..report.report import FORMS, Report, read_saved
from ..scan.scan import scan
from ..trace.headroom import FORMATS, Need, Row, draw, fits, trend_words
from ..trace.trace_file import Trace, batch_words
from ..util.messages import Tell, module_name, near, visible
from .commands import command_parser, print_answer, write_page

_READS = (
    "a trace, a report.json, a black box (*.blackbox), and the folder that watch(output_dir=...) or watch(trace=...)"
    " named"
)
_SHOW = """\
exit status: 0; 1 when --ranks has a finding or --box a process that did not end by itself; 2 when there is nothing to
show

examples:
  nanwatch show run.parquet                      the latest batch of a trace
  nanwatch show run.parquet --html run.html      a page with a picture of the whole run
  nanwatch show out                              the newest report in the folder that watch(output_dir="out") wrote
  nanwatch show out --ranks                      the reports of all ranks as one
  nanwatch show out --box                        what each process was doing when it died, or does now; without --box
                                                 too where the folder has no report
  nanwatch show out --box --live                 the same again every 2 s
"""


def show_main(arguments: list[str]) -> int:
    """Run `nanwatch show` and return the exit status."""
    what = "Print a batch of a trace, a report, the reports of all ranks as one, or black boxes."
    parser = command_parser("show", what, _SHOW)
    words = "a trace, a report.json, a black box, or a folder; without it the black boxes of runs without output_dir"
    parser.add_argument("paths", metavar="PATH", type=Path, nargs="*", help=words)
    parser.add_argument("--ranks", action="store_true", help="merge the reports of several ranks")
    parser.add_argument("--box", action="store_true", help="show the black boxes")
    words = "on a terminal look again every 2 s until Ctrl-C"
    parser.add_argument("--live", action="store_const", const=2, default=0, help=words)
    words = "form of a report on stdout (default: %(default)s)"
    parser.add_argument("--format", choices=sorted(FORMS), default="text", help=words)
    parser.add_argument("--batch", type=int, metavar="N", help="of a trace: this batch (default: the latest)")
    words = "write a page in place of the text; of a trace without --batch a picture of the run"
    parser.add_argument("--html", type=Path, metavar="PAGE", help=words)
    return print_answer(parser, arguments, _show)


def _show(options: argparse.Namespace, tell: Tell) -> tuple[Any, int]:
    for path in options.paths:
        if not (path.is_file() or path.is_dir()):  # a pipe would never answer
            raise FileNotFoundError(f"no file or folder {str(path)!r}: show reads {_READS}{near(path)}")
    if options.ranks or len(options.paths) > 1:
        merged = merge(*options.paths, tell=tell)
        return merged, int(bool(merged.failed))
    path = options.paths[0] if options.paths else state_folder()
    file = _newest_report(path)
    has_boxes = any(path.glob(f"blackbox/*{SUFFIX}")) or any(path.glob(f"*{SUFFIX}"))
    if options.box or not options.paths or path.suffix == SUFFIX or (has_boxes and file == path):
        if options.html is not None:
            raise ValueError("--html is for a trace or a report, not for a black box; leave it out")
        tell("reading")
        job = read_job(path)
        return job, int(job.is_bad)
    report, heading, page = _opened(file, options.batch, tell)
    if file.parent.parent == path:  # one of several
        heading = [f"{file}:", "", *heading]
    wrote = write_page(options.html, page, tell)
    form = FORMS["json" if options.json else options.format]
    if form.name != "text":
        return form.render(report), 0
    return "\n".join([*map(visible, heading), wrote or form.render(report)]), 0


def _opened(
    file: Path, batch: int | None, tell: Tell
) -> tuple[Report | SpikeReport, list[str], Callable[[], str]]:
    """Return the report in a file, or of a batch of a trace, the lines above it, and what makes its page."""
    if _is_report(file):
        if batch is not None:
            raise ValueError(f"--batch is for a trace, and {file} is a report; leave it out")
        tell(f"reading {file.name}")
        try:
            saved = read_saved(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is no report, or is damaged: {error}") from None
        return saved, [], saved.to_html
    trace = Trace.open(file, tell)
    report = trace.report(latest_batches(trace, 1)[0] if batch is None else batch)
    page = (lambda: draw(trace).to_html()) if batch is None else report.to_html
    return report, [trace_line(trace), ""], page


def latest_batches(trace: Trace, most: int) -> tuple[int, ...]:
    """Return the latest batches of a trace, at least one. Raises ValueError where it has none."""
    if not trace.batches:
        raise ValueError(f"{trace.path} has no batch yet")
    return trace.batches[-most:]


def trace_line(trace: Trace) -> str:
    """Return the line that says what a trace has."""
    lost = f", {trace.lost_frames:,} frames lost" if trace.lost_frames else ""
    return f"{trace.path}: {batch_words(trace.batches)}, rank {trace.rank}{lost}"


def _newest_report(path: Path) -> Path:
    """Return the report in the folder of a failure, else the newest in the folders below, else the path itself.

    The last frames of a rank that did not fail, in a folder peer-rank-N, come after every failure.
    """
    for pattern in ("report.json", "*/report.json"):
        files = [(not x.parent.name.startswith("peer-"), x.stat().st_mtime_ns, x) for x in path.glob(pattern)]
        if files:
            return max(files)[-1]
    return path


def _is_report(file: Path) -> bool:
    """Return whether a path is a report, else a trace. Raise ValueError for a capsule and a file of another kind."""
    folder = file.parent if file.name == FILE else file
    if (folder / FILE).exists():
        command = f"nanwatch replay {shlex.quote(str(folder))} --model PKG.MOD:NAME"
        raise ValueError(f"{file} is a capsule: {command} makes its call again")
    if not file.is_file():
        if not any(file.glob("part-*.parquet")):
            raise ValueError(f"{file} has no report, black box or part of a trace: show reads {_READS}")
        return False
    with file.open("rb") as opened:
        start = opened.read(64).lstrip()
    if not start.startswith((b"{", b"PAR1")):
        kinds = f"show reads {_READS}; nanwatch scan reads a checkpoint"
        raise ValueError(f"{file} is neither a report nor a trace: {kinds}")
    return start.startswith(b"{")


# Modules of a trace

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
    return print_answer(parser, arguments, _top)


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
            "modules": plain(rows),
            "marks": plain(picture.marks),
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
    table = [_COLUMNS]
    for row in rows:
        bits, trend, failed = bits_words(row.bits), trend_words(row.trend), str(row.num_failed or "")
        table.append((bits, trend, str(row.batch), f"{row.abs_max:.2e}", failed, row.place))
    return ["  ".join([f"{cell:>10}" for cell in line[:-1]]) + f"  {line[-1]}" for line in table]


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
    what = "Tell whether a format fits what a model computed, and name the narrowest that fits each module."
    parser = command_parser("fits", what, _FITS)
    parser.add_argument("trace", metavar="TRACE", help="a trace: what watch(trace=...) was given")
    words = f"tell whether this format fits, and where it does not: {', '.join(FORMATS)}"
    parser.add_argument("--for", dest="format", choices=FORMATS, metavar="FORMAT", help=words)
    words = "room to leave, in doublings of the largest value (default: %(default)g)"
    parser.add_argument("--margin-bits", type=float, default=1.0, metavar="BITS", help=words)

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

    return print_answer(parser, arguments, find)


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
        grown = f"Nothing overflows, even {2**margin_bits:g} times as large."
        return [f"{name}: fits all {len(needs)} outputs and weights of modules. {grown}"]
    head = f"{name}: does not fit {len(bad)} of {len(needs)} outputs and weights of modules."
    rows = [f"{need.abs_max:8.2e}  {need.verdicts[name]:<12}  {_of(need)}" for need in bad]
    return [head, "", f"{'largest':>8}  {'verdict':<12}  module", *rows]


def _of(need: Need) -> str:
    return f"{module_name(need.module)} ({need.part}, {', '.join(need.dtypes)})"


# A checkpoint

_SCAN = """\
FILE is a file of safetensors, torch.save (.pt, .pth, .bin, .ckpt), GGUF or NumPy (.npz, .npy), an index of such files,
or a folder with these or of torch.distributed.checkpoint. Nothing in a file is run: a pickle that would run code is
refused.

exit status: 0 when it is sound, 1 when OTHER does not have the same numbers, 2 when there is nothing to read or to
check, 3 when a value is nan or inf or a file is damaged

examples:
  nanwatch scan model.safetensors
  nanwatch scan checkpoints/step-1000
  nanwatch scan hf/model.safetensors.index.json --against converted.gguf
"""


def scan_main(arguments: list[str]) -> int:
    """Run `nanwatch scan` and return the exit status."""
    description = (
        "Read each tensor of a checkpoint and name what is nan, inf, dead, far from its siblings, or lost in a"
        " damaged file."
    )
    parser = command_parser("scan", description, _SCAN)
    parser.add_argument("files", metavar="FILE", nargs="+", help="the files of one checkpoint, or its folder")
    words = "what became of FILE, the original, such as a conversion: tell which tensors differ, and how far"
    parser.add_argument("--against", metavar="OTHER", help=words)

    def find(options: argparse.Namespace, tell: Tell) -> tuple[Any, int]:
        result = scan(*options.files, against=options.against, tell=tell)
        status = int(not result.is_faithful) if result.is_checked else 2
        return result, status if result.is_sound else 3

    return print_answer(parser, arguments, find)
