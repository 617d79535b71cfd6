"""`nanwatch show` and `nanwatch scan`: the commands that read the files of runs."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..blackbox.job import read_job
from ..blackbox.process import state_folder
from ..blackbox.story import SUFFIX
from ..ranks.merge import merge
from ..report.forms import FORMS
from ..report.report import Report
from ..report.spike import SpikeReport, read_saved
from ..scan.scan import scan
from ..trace.picture import draw
from ..trace.trace_file import Trace, batch_words
from ..util.progress import Tell
from ..util.visible import near, visible
from .commands import answered, command_parser, write_page

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
    parser = command_parser(
        "show", "Print a batch of a trace, a report, the reports of all ranks as one, or black boxes.", _SHOW
    )
    parser.add_argument(
        "paths",
        metavar="PATH",
        type=Path,
        nargs="*",
        help="a trace, a report.json, a black box, or a folder; without it the black boxes of runs without output_dir",
    )
    parser.add_argument("--ranks", action="store_true", help="merge the reports of several ranks")
    parser.add_argument("--box", action="store_true", help="show the black boxes")
    parser.add_argument(
        "--live",
        action="store_const",
        const=2,
        default=0,
        help="on a terminal look again every 2 s until Ctrl-C",
    )
    parser.add_argument(
        "--format",
        choices=sorted(FORMS),
        default="text",
        help="form of a report on stdout (default: %(default)s)",
    )
    parser.add_argument("--batch", type=int, metavar="N", help="of a trace: this batch (default: the latest)")
    parser.add_argument(
        "--html",
        type=Path,
        metavar="PAGE",
        help="write a page in place of the text; of a trace without --batch a picture of the run",
    )
    return answered(parser, arguments, _show)


def _show(options: argparse.Namespace, tell: Tell) -> tuple[Any, int]:
    for path in options.paths:
        if not path.exists():
            raise FileNotFoundError(f"there is no {str(path)!r}: show reads {_READS}{near(path)}")
    if options.ranks or len(options.paths) > 1:
        merged = merge(*options.paths, tell=tell)
        return merged, int(bool(merged.failed))
    path = options.paths[0] if options.paths else state_folder()
    file = _newest_report(path)
    has_boxes = any(path.glob(f"blackbox/*{SUFFIX}")) or any(path.glob(f"*{SUFFIX}"))
    if options.box or not options.paths or path.suffix == SUFFIX or (has_boxes and file == path):
        if options.html is not None:
            raise ValueError(
                "--html is for a trace or a report, and a black box has text and --json; leave it out"
            )
        tell("reading")
        job = read_job(path)
        return job, int(job.is_bad)
    report, heading, page = (_of_report if _is_report(file) else _of_trace)(file, options.batch, tell)
    if file.parent.parent == path:  # one of several
        heading = [f"{file}:", "", *heading]
    wrote = write_page(options.html, page, tell)
    form = FORMS["json" if options.json else options.format]
    if form.name != "text":
        return form.render(report), 0
    return "\n".join([*map(visible, heading), wrote or form.render(report)]), 0


# A report, the lines above it, and what makes its page.
_Shown = tuple[Report | SpikeReport, list[str], Callable[[], str]]


def _of_report(file: Path, batch: int | None, tell: Tell) -> _Shown:
    if batch is not None:
        raise ValueError(f"--batch is for a trace, and {file} is a report; leave it out")
    tell(f"reading {file.name}")
    try:
        report = read_saved(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no report, or is damaged: {error}") from None
    return report, [], report.to_html


def _of_trace(file: Path, batch: int | None, tell: Tell) -> _Shown:
    trace = Trace.open(file, tell)
    report = trace.report(latest_batches(trace, 1)[0] if batch is None else batch)
    return (
        report,
        [trace_line(trace), ""],
        (lambda: draw(trace).to_html()) if batch is None else report.to_html,
    )


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
        reports = [
            (not x.parent.name.startswith("peer-"), x.stat().st_mtime_ns, x) for x in path.glob(pattern)
        ]
        if reports:
            return max(reports)[-1]
    return path


def _is_report(file: Path) -> bool:
    """Return whether a path is a report, else a trace. Raise ValueError for a regular file that is neither."""
    if not file.is_file():  # a folder of a trace's parts
        return False
    with file.open("rb") as opened:
        start = opened.read(64).lstrip()
    if not start.startswith((b"{", b"PAR1")):
        raise ValueError(
            f"{file} is neither a report nor a trace: show reads {_READS}; nanwatch scan reads a checkpoint"
        )
    return start.startswith(b"{")


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
    parser.add_argument(
        "--against",
        metavar="OTHER",
        help="what became of FILE, the original, such as a conversion: tell which tensors differ, and how far",
    )

    def find(options: argparse.Namespace, tell: Tell) -> tuple[Any, int]:
        result = scan(*options.files, against=options.against, tell=tell)
        status = int(not result.is_faithful) if result.is_checked else 2
        return result, status if result.is_sound else 3

    return answered(parser, arguments, find)
