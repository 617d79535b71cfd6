"""Run Python commands in forks of this process, which has imported torch and nanwatch: a command then starts at once.

Each line on stdin is a JSON array: folder, file for stdout and stderr, words of the command. Its exit status is a line
on stdout.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import torch  # noqa: F401  # imported for the forks

import nanwatch.__main__
import nanwatch.cli.commands


def main() -> None:
    answers = os.dup(1)
    for line in sys.stdin:
        folder, output, words = json.loads(line)
        child = os.fork()
        if child == 0:
            os.close(answers)
            os.chdir(folder)
            file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for descriptor in (1, 2):
                os.dup2(file, descriptor)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            run(words)
            return
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(answers, f"{status}\n".encode())


def run(words: list[str]) -> None:
    """Do as `python SCRIPT ...` or `nanwatch ...` does."""
    if words[0] == "nanwatch":
        sys.argv = words
        sys.path[0] = ""
        sys.exit(nanwatch.__main__.main())
    sys.argv = words[1:]
    sys.path[0] = str(Path(words[1]).resolve().parent)
    runpy.run_path(words[1], run_name="__main__")


if __name__ == "__main__":
    main()
