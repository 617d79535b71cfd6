"""Steps of a build: where its files lie, how its output is logged, and the error that ends it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

CSRC = Path(__file__).resolve().parent  # where includes begin
ROOT = CSRC.parent
LOG = ROOT / "build" / "compile.log"


class BuildError(Exception):
    """Why the compiled part, or its CUDA part, cannot be built here, in words for the user."""


def run_step(name: str, command: list[str], failure: str) -> None:
    """Run a command with its output in LOG, and print the name and the time; BuildError(failure) where it fails."""
    LOG.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with LOG.open("a+", errors="replace") as log:
        begin = log.seek(0, os.SEEK_END)
        print(shlex.join(command), file=log, flush=True)
        failed = subprocess.run(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT).returncode != 0
        log.seek(begin)
        errors = [line for line in log if failed and re.search(r"\berror\b", line, re.IGNORECASE)]
    took = "failed after" if failed else "took"
    print(f"nanwatch: {name} {took} {time.monotonic() - started:.0f} s", flush=True)
    if failed:
        print("".join(errors[:10]) + f"nanwatch: all of it is in {LOG}", file=sys.stderr, flush=True)
        raise BuildError(failure)


def output_of(command: list[str], seconds: int = 120) -> str:
    """Return stdout and stderr of a command; BuildError when it cannot run, fails or takes longer."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"`{shlex.join(command)}` did not run: {error}") from error
    if done.returncode != 0:
        text = (done.stdout + done.stderr).strip()[-400:]
        raise BuildError(f"`{shlex.join(command)}` failed ({done.returncode}): {text}")
    return done.stdout + done.stderr
