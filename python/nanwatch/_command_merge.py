"""`python -m nanwatch merge DIR`: the reports of all ranks of a job as one."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ._commands import command_parser
from .merge import document, merge, merged_text

_EXAMPLES = """\
exit status: 0 when all is finite, 1 when a rank has a finding, 2 when there is nothing to read

examples:
  python -m nanwatch merge run                the folder that watch(output_dir="run") wrote on all ranks
  python -m nanwatch merge run --json
"""


def main(arguments: list[str]) -> int:
    """Runs the command; returns the exit status."""
    parser = command_parser(
        "merge",
        "One report from those of several ranks: the origin, headroom by module and rank, and weights"
        " that should be alike and are not.",
        _EXAMPLES,
    )
    parser.add_argument("folder", metavar="DIR", type=Path, help="the folder with the ranks' folders in it")
    options = parser.parse_args(arguments)
    try:
        merged = merge(options.folder)
    except ValueError as error:
        print(f"python -m nanwatch merge: {error}", file=sys.stderr)
        return 2
    print(json.dumps(document(merged), indent=2) if options.json else merged_text(merged))
    return 1 if merged.origins else 0
