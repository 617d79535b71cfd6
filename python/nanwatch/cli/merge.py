"""`nanwatch merge DIR`: merge the reports of all ranks of a job."""

from __future__ import annotations

import json
from pathlib import Path

from ..distributed.merge import merge
from ..distributed.merge_pages import document, merged_html, merged_text
from ..util.progress import shown
from .commands import command_parser, failed

_EXAMPLES = """\
exit status: 0 when all is finite, 1 when a rank has a finding, 2 when there is nothing to read

examples:
  nanwatch merge run                the folder that watch(output_dir="run") wrote on all ranks
  nanwatch merge run --html merged.html
  nanwatch merge run --attempt 0    of an elastic job that was restarted: its first attempt
  nanwatch merge run --json > job.json
"""


def main(arguments: list[str]) -> int:
    """Run the command and return the exit status."""
    parser = command_parser(
        "merge",
        "One report from those of several ranks: the origin, headroom by module and rank, and weights"
        " that should be alike and are not.",
        _EXAMPLES,
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
    try:
        with shown() as tell:
            merged = merge(*options.paths, attempt=options.attempt, tell=tell)
            if options.html is not None:
                tell("drawing the page")
                options.html.write_text(merged_html(merged), encoding="utf-8")
            tell("comparing the ranks")
            printed = json.dumps(document(merged), indent=2) if options.json else merged_text(merged)
    except (ValueError, OSError, ImportError) as error:
        return failed("merge", error)
    print(printed)
    return 1 if merged.failed else 0
