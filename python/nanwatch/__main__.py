"""`nanwatch`: a command by its name, and without one the doctor."""

from __future__ import annotations

import sys

from .cli.commands import COMMANDS, doctor_main, run_command, until_cut


def main(arguments: list[str] | None = None) -> int:
    """Run the command, or without one the doctor. Return the exit status, which is in the help of each."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in COMMANDS:
        return run_command(arguments[0], arguments[1:])
    return until_cut(lambda: doctor_main(arguments, name=""))


if __name__ == "__main__":
    sys.exit(main())
