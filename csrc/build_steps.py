"""Steps of a build: where its files lie, how its output is logged, and the error that ends it."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

CSRC = Path(__file__).resolve().parent  # where includes begin
ROOT = CSRC.parent
LOG = ROOT / "build" / "compile.log"


class BuildError(Exception):
    """Why the compiled part, or its CUDA part, cannot be built here, in words for the user."""


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Run a step with all of its output in LOG, also that of its processes; print its name and time, or its errors."""
    LOG.parent.mkdir(parents=True, exist_ok=True)
    begin, started, failed = LOG.stat().st_size if LOG.exists() else 0, time.monotonic(), True
    sys.stdout.flush()
    sys.stderr.flush()
    outside = os.dup(1), os.dup(2)
    try:
        with LOG.open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        yield
        failed = False
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for saved, stream in zip(outside, (1, 2), strict=True):
            os.dup2(saved, stream)
            os.close(saved)
        print(
            f"nanwatch: {name} {'failed after' if failed else 'took'} {time.monotonic() - started:.0f} s",
            flush=True,
        )
        if failed:
            with LOG.open(errors="replace") as log:
                log.seek(begin)
                errors = [line for line in log if re.search(r"\berror\b", line, re.IGNORECASE)]
            print("".join(errors[:10]) + f"nanwatch: all of it is in {LOG}", file=sys.stderr, flush=True)


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
