"""`nanwatch options`: the options that a `watch()` has where its code says none, and where each was said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..session.option_sources import in_force
from ..util.visible import visible
from .commands import command_parser, failed

_EXAMPLES = """\
What NANWATCH_OPTIONS says goes before the code, the code before nanwatch.toml or [tool.nanwatch] of pyproject.toml in
this folder or the nearest one above.

exit status: 0, or 2 when an option is wrong

examples:
  nanwatch options
  NANWATCH_OPTIONS="gradients=true output_dir=out include=encoder.*,decoder.*" nanwatch options
"""


def main(arguments: list[str]) -> int:
    """Run the command and return the exit status."""
    parser = command_parser(
        "options",
        "Show the options in force for a watch() whose code says none, and who said them.",
        _EXAMPLES,
    )
    as_json = parser.parse_args(arguments).json
    try:
        said = in_force({})
    except (TypeError, ValueError) as error:
        return failed("options", error)
    if as_json:
        document = {name: {"value": _plain(one.value), "source": one.source} for name, one in said.items()}
        print(json.dumps(document, allow_nan=False, indent=2))
        return 0
    for name, one in said.items():
        print(visible(f"{name:<18} {_plain(one.value)!s:<24} {one.source}"))
    return 0


def _plain(value: Any) -> Any:
    """Return the value as JSON has it."""
    return str(value) if isinstance(value, Path) else list(value) if isinstance(value, tuple) else value
