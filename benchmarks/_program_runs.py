"""Runs of the programs of `reruns/`, each in a process of its own that leads a session."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch._dynamo  # noqa: F401  (an optimizer imports it at its first step, which takes a second)
from reruns.case import CASES, Case, as_facts

import nanwatch

HERE = Path(__file__).parent
RERUN = "NANWATCH_RERUN"


@dataclass
class Outcome:
    """How one run of a program ended."""

    status: str
    seconds: float
    output: str = ""
    errors: str = ""
    told: int = 0
    bad: int = 0
    state: dict[str, Any] = field(default_factory=dict)
    process: dict[str, Any] = field(default_factory=dict)
    findings: list[dict[str, Any]] = field(default_factory=list)
    left: int = 0  # processes that outlived the program


def load(programs: Path = HERE) -> dict[str, Case]:
    """Import the programs of that folder and return the cases by name."""
    for path in sorted((programs / "reruns").glob("*.py")):
        importlib.import_module(f"reruns.{path.stem}")
    return CASES


def run_forked(
    one: Case, folder: Path, *, watched: bool, in_process: bool, limit: float, programs: Path = HERE
) -> Outcome:
    """Run the case in a fork of this process, which leads a session of its own, with the programs of that folder."""
    folder.mkdir(parents=True)
    pid = os.fork()
    if pid == 0:
        try:
            os.setsid()
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
            _run(one.name, folder, programs, watched=watched, in_process=in_process)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    return _outcome(pid, folder, limit)


def _run(name: str, folder: Path, programs: Path, *, watched: bool, in_process: bool) -> None:
    """Run the case in this process, in a folder of its own."""
    if programs != HERE:
        for module in [x for x in sys.modules if x.partition(".")[0] == "reruns"]:
            del sys.modules[module]
        sys.path.insert(0, str(programs))
    load(programs)
    own = sys.modules["reruns.case"]
    place = folder / "work"
    place.mkdir()
    os.chdir(place)
    os.environ.pop(RERUN, None)
    if in_process:
        os.environ[RERUN] = "in-process"
    own.run_case(own.CASES[name], watched=watched, file=folder / "outcome.json")
    sys.stdout.flush()


def run_fresh(one: Case, folder: Path, *, watched: bool, in_process: bool, limit: float) -> Outcome:
    """Run the case in a new interpreter."""
    folder.mkdir(parents=True)
    flags = ["--watched"] * watched + ["--in-process"] * in_process
    command = [sys.executable, __file__, one.name, str(folder), *flags]
    with open(folder / "stdout", "wb") as out, open(folder / "stderr", "wb") as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)
    return _outcome(process.pid, folder, limit)


def _outcome(pid: int, folder: Path, limit: float) -> Outcome:
    """Wait for the process and return how it ended. After the limit its session is killed."""
    began = time.monotonic()
    ended, status = 0, 0
    while not ended and time.monotonic() - began < limit:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if not ended:
            time.sleep(0.01)
    seconds = time.monotonic() - began
    left = _left(pid) if ended else 0
    _kill(pid)
    if not ended:
        os.waitpid(pid, 0)
    texts = [(folder / name).read_text(encoding="utf-8", errors="replace") for name in ("stdout", "stderr")]
    file = folder / "outcome.json"
    told = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    how = told.pop("ended", "")
    if not ended:
        how = "hangs"
    elif os.WIFSIGNALED(status):
        how = signal.Signals(os.WTERMSIG(status)).name
    outcome = Outcome(how or f"exit {os.WEXITSTATUS(status)}", seconds, *texts, left=left, **told)
    for path in sorted(folder.glob("work/**/report.json")):
        outcome.findings.append(as_facts(nanwatch.Report.from_json(path.read_text(encoding="utf-8"))))
    return outcome


def _left(session: int) -> int:
    """Return how many processes of the session outlive it for three seconds."""
    end = time.monotonic() + 3
    while found := _processes(session):
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    return len(found)


def _processes(session: int) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(path.parent.name))
    return found


def _kill(session: int) -> None:
    for pid in _processes(session):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


if __name__ == "__main__":
    _, name, place, *flags = sys.argv
    _run(name, Path(place), HERE, watched="--watched" in flags, in_process="--in-process" in flags)
    os._exit(0)
