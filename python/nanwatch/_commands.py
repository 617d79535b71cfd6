"""The sub-commands of `python -m nanwatch`: one line each in COMMANDS, one module each."""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Command:
    """A sub-command: what `--help` says of it, and the module whose `main(arguments) -> int` runs it."""

    summary: str
    module: str

    def run(self, arguments: list[str]) -> int:
        """Run it and return the exit status. Only now is its module imported."""
        status: int = importlib.import_module(f".{self.module}", __package__).main(arguments)
        return status


COMMANDS = {
    "diff": Command("where two traces, or two batches of one, part", "_command_diff"),
    "formats": Command(
        "the narrowest format that holds what each module makes, by a trace", "_command_formats"
    ),
    "merge": Command("the reports of all ranks of a job as one", "_command_merge"),
    "netcheck": Command("can the ranks of a job reach each other? Start it with torchrun", "netcheck"),
    "replay": Command("make the call in a capsule again, in one dtype or several", "_command_replay"),
    "run": Command("watch the model of an unchanged training script", "_command_run"),
    "show": Command("the frames of a trace, or a saved report", "_command_show"),
}


def help_text() -> str:
    """The part of `--help` that lists them."""
    lines = [f"  {name:<10}{command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(["commands (each has a --help of its own):", *lines])


def command_parser(name: str, description: str, examples: str) -> argparse.ArgumentParser:
    """The parser of a command that prints for people, or with --json for programs."""
    parser = argparse.ArgumentParser(
        prog=f"python -m nanwatch {name}",
        description=description,
        epilog=examples,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON document on stdout and nothing else"
    )
    return parser
