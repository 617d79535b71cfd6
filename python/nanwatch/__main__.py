"""`nanwatch`: a command by its name, and without one the doctor."""

from __future__ import annotations

import sys

from . import __version__
from .cli import doctor
from .cli.commands import COMMANDS, until_cut

_EXAMPLES = """\
examples:
  nanwatch                      versions, devices, and what is missing, as `doctor` says
  nanwatch --selfcheck          every implementation against the reference; exit status 1 on a difference
  nanwatch --json               the same for programs: one JSON document on stdout
  NANWATCH_CPU=avx2 nanwatch    with the CPU part held at AVX2
  nanwatch replay --help        what a command does, and with which options
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the command, or without one the doctor. Return the exit status, which is in the help of each."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in COMMANDS:
        return COMMANDS[arguments[0]].run(arguments[1:])
    return until_cut(lambda: _without_command(arguments))


def _without_command(arguments: list[str]) -> int:
    parser = doctor.parser("", _EXAMPLES)
    parser.add_argument(
        "--version", action="version", version=f"nanwatch {__version__}", help="print the version and exit"
    )
    commands = parser.add_subparsers(
        title="commands, each with a --help of its own", metavar="COMMAND", dest="command"
    )
    for name, command in COMMANDS.items():
        commands.add_parser(name, help=command.summary, add_help=False)
    options = parser.parse_args(arguments)
    if options.command:
        parser.error(f"the command goes first: {parser.prog} {options.command} ...")
    return doctor.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
