"""Does the black box survive, and say where the process was? Processes that die in many ways, at random places.

Each trial is a training in a process of its own, which has an account of where it is in memory that it shares with the
judge. A trial is right if

- the black box opens, and names the modules that ran, the batch and the phase; the end of the process is told right;
- at most the last 64 calls are lost;
- the exit status, the flag of a core dump and the output are those of the same program with `NANWATCH=0`;
- no other process is harmed: a job in the same folder, the parent of a fork.

Where the folder refuses the file there is no black box, one warning, and the same end and output.

    python benchmarks/judge_blackbox.py                        # 200 a fault, 20 jobs, 100,000 files: half an hour
    python benchmarks/judge_blackbox.py -k SIGKILL --times 20  # some of them
    python benchmarks/judge_blackbox.py --mutations 0 --json blackbox.json

Some faults need root (a small disk, a read-only one); the table says which were left out.
"""

from __future__ import annotations

import argparse
import atexit
import functools
import gc
import json
import os
import random
import resource
import runpy
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import _box_account
import _box_faults
import _box_program
import torch
import torch._dynamo  # an optimizer imports it at its first step, which takes a second
from _box_account import Account, Trial
from _box_checks import Ended, differences, names, wrong
from _box_mutations import MOST_MEMORY, judge_mutations
from _box_ranks import RANKS, judge_ranks

import nanwatch.__main__
import nanwatch.cli.commands
import nanwatch.cli.run

HERE = Path(__file__).parent
LIMIT = 60.0  # seconds for a process that takes less than one
_DISKS = {
    "disk becomes full": "size=11m",  # a black box, and little else
    "disk is full": "size=4m",
    "read-only folder": "ro",  # of the user's own, as `watch` refuses such an output_dir
}


@dataclass
class Score:
    """Trials of one fault: how many, how many were right, the most calls lost, and what was wrong."""

    fault: str
    trials: int = 0
    right: int = 0
    lost: int = 0
    faults: list[str] = field(default_factory=list)
    left_out: str = ""

    def __str__(self) -> str:
        if self.left_out:
            return f"---- {self.fault:28} left out: {self.left_out}"
        mark = "ok  " if self.right == self.trials else "FAIL"
        return f"{mark} {self.fault:28} {self.right:6,} of {self.trials:6,}, at most {self.lost} calls lost"

    def add(self, faults: list[str], lost: int = 0) -> None:
        self.trials += 1
        self.right += not faults
        self.lost = max(self.lost, lost)
        self.faults += faults


class Begin(BaseException):
    """Unwinds a forked child to the top of this file, where it runs its program and ends as Python does."""

    def __init__(self, program: Callable[[], object], *, is_whole: bool) -> None:
        super().__init__()
        self.program = program
        self.is_whole = is_whole  # the end too


def start(trial: Trial, work: Path, account: Account, *, is_watched: bool) -> int:
    """Start the process of a trial in the folder `work`; return its number."""
    account.clear()
    pid = os.fork()
    if pid:
        return pid
    os.chdir(work)
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(work / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND), number)
    size = 4096 if trial.dumps_core else 0
    resource.setrlimit(resource.RLIMIT_CORE, (size, size))
    if trial.fault == "RLIMIT_FSIZE":
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    os.environ["NANWATCH"] = "1" if is_watched else "0"
    os.environ["XDG_STATE_HOME"] = str(work / "out")
    _box_account.SHARED = account
    is_whole = trial.seed % 12 == 0
    script = str(HERE / "_box_program.py")
    sys.argv = [script, json.dumps(asdict(trial))]
    if trial.way == "run":
        folder = ["--output-dir", trial.folder] if trial.folder else []
        sys.argv = ["nanwatch", "run", "--gradients", *folder, *sys.argv]
        raise Begin(lambda: sys.exit(nanwatch.__main__.main()), is_whole=is_whole)
    raise Begin(lambda: runpy.run_path(script, run_name="__main__"), is_whole=is_whole)


def ended(pid: int, work: Path) -> Ended:
    """Wait for a process. One that takes too long is killed."""
    descriptor = os.pidfd_open(pid)
    is_late = not select.select([descriptor], [], [], LIMIT)[0]
    os.close(descriptor)
    if is_late:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    texts = [(work / name).read_text(errors="replace") for name in ("stdout", "stderr")]
    return Ended(None if is_late else status, *texts)


class Judge:
    """Runs trials in folders of its own, and remembers how each kind ends without nanwatch."""

    def __init__(self, top: Path, seed: int) -> None:
        self._top = top
        self._dice = random.Random(seed)
        self._plain: dict[Trial, Ended] = {}
        self._account, self._other = Account(), Account()

    def trial(self, fault: str) -> Trial:
        """Return a random trial of a fault."""
        dice, kind = self._dice, _box_faults.KINDS[fault]
        threads = dice.choice((1, 1, 1, 3)) if kind.is_threaded else 1
        return Trial(
            fault,
            "script" if threads > 1 else dice.choice(("script", "run")),
            dice.choice(kind.places if threads == 1 else ("before", "after")),
            dice.randrange(len(names())),
            dice.randrange(1, _box_program.BATCHES),
            threads=threads,
            seed=dice.randrange(1 << 30),
            dumps_core=dice.random() < 0.2,
        )

    def judge(self, fault: str) -> tuple[list[str], int]:
        """Run one trial. Return what was wrong, and the number of calls lost."""
        kind = _box_faults.KINDS[fault]
        work = self._folder(fault)
        trial = replace(self.trial(fault), folder="" if fault == "read-only folder" else str(work / "out"))
        other = None
        if fault == "two jobs":
            calm = Trial("none", "script", folder=trial.folder)
            (work / "other").mkdir()
            other = start(calm, work / "other", self._other, is_watched=True)
        pid = start(trial, work, self._account, is_watched=True)
        if fault == "SIGKILL by the parent":
            self._kill_at_random(pid)
        watched = ended(pid, work)
        faults, lost = [], 0
        if not self._account.is_met and fault != "SIGKILL by the parent":
            faults.append(f"the fault did not happen: {watched.errors[-500:]}")
        faults += differences(self._without(trial), watched, kind.box)
        if kind.box != "none":
            wrongs, lost = self._wrong(trial, self._account, pid)
            faults += wrongs
        if other is not None:
            calm_end = ended(other, work / "other")
            faults += [f"the other job {one}" for one in differences(self._without(calm), calm_end, "opens")]
            faults += [f"the other job {one}" for one in self._wrong(calm, self._other, other)[0]]
        self._clear(work, fault)
        return [f"{trial}: {one}" for one in faults], lost

    def _wrong(self, trial: Trial, account: Account, pid: int) -> tuple[list[str], int]:
        paths = [*Path(trial.folder).glob(f"blackbox/*-{pid}-*.blackbox")]
        if len(paths) != 1:
            return [f"left {len(paths)} black boxes"], 0
        return wrong(trial, account, paths[0], pid)

    def _without(self, trial: Trial) -> Ended:
        """Return how the program ends with NANWATCH=0: once for each kind of fault and place."""
        if trial.fault == "SIGKILL by the parent":
            return Ended(signal.SIGKILL, "", "")
        key = replace(trial, module=0, batch=1, seed=trial.seed % 12, folder="")
        if key not in self._plain:
            work = self._folder(trial.fault)
            account = Account()
            folder = str(work / "out") if trial.folder else ""
            pid = start(replace(key, folder=folder), work, account, is_watched=False)
            self._plain[key] = ended(pid, work)
            self._clear(work, trial.fault)
        return self._plain[key]

    def _kill_at_random(self, pid: int) -> None:
        end = time.monotonic() + LIMIT
        while (
            self._account.latest[1] < 1 and time.monotonic() < end and os.waitid(os.P_PID, pid, _LOOK) is None
        ):
            time.sleep(0.0005)
        time.sleep(self._dice.random() * 0.02)
        os.kill(pid, signal.SIGKILL)

    def _folder(self, fault: str) -> Path:
        work = Path(tempfile.mkdtemp(dir=self._top))
        (work / "out").mkdir()
        if fault in _DISKS:
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", _DISKS[fault], "none", str(work / "out")], check=True
            )
        return work

    def _clear(self, work: Path, fault: str) -> None:
        if fault in _DISKS:
            subprocess.run(["umount", str(work / "out")], check=True)
        shutil.rmtree(work)


_LOOK = os.WEXITED | os.WNOHANG | os.WNOWAIT


def judge_fault(fault: str, times: int, top: Path, seed: int) -> Score:
    """Run the trials of one fault."""
    score = Score(fault)
    if fault == RANKS:
        for number in range(max(1, times // 10)):
            score.add(judge_ranks(top, seed * 10_000 + number))
    elif fault in _DISKS and os.geteuid() != 0:
        score.left_out = "needs root"
    elif fault == "C++ exception" and not _box_faults.compile_throwing():
        score.left_out = "needs g++"
    else:
        judge = Judge(top, seed)
        for _ in range(times):
            score.add(*judge.judge(fault))
    return score


def main() -> int:
    """Judge what the command line asks for, and return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-k", metavar="WORD", action="append", help="only faults with this in their name")
    parser.add_argument("--times", type=int, default=200, metavar="N", help="trials of each fault (200)")
    parser.add_argument("--mutations", type=int, default=100_000, metavar="N", help="damaged files (100,000)")
    parser.add_argument("--seed", type=int, default=0, help="another seed for other places")
    parser.add_argument("--verbose", action="store_true", help="print every wrong trial")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the scores there")
    given = parser.parse_args()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # or each fork would look through all of it, and so copy it, at its end
    top = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
    atexit.register(_remove, os.getpid(), top)
    scores = []
    for fault in [*_box_faults.KINDS, RANKS]:
        if any(word in fault for word in given.k or [""]):
            scores.append(judge_fault(fault, given.times, top, given.seed))
            _show(scores[-1], given.verbose)
    if given.mutations and given.k is None:
        scores.append(_judge_mutations(given.mutations, top, given.seed))
        _show(scores[-1], given.verbose)
    if given.json:
        given.json.write_text(json.dumps([asdict(score) for score in scores], indent=1))
    return int(any(score.right < score.trials for score in scores))


def _show(score: Score, is_verbose: bool) -> None:
    print(score, flush=True)
    for line in score.faults[: None if is_verbose else 3]:
        print(f"     {line[:1000]}", flush=True)


def _judge_mutations(count: int, top: Path, seed: int) -> Score:
    """Damage the black boxes of a process that died and of one that ended."""
    score = Score("damaged files", right=count, trials=count)
    for fault in ("SIGSEGV", "none"):
        folder = top / fault
        folder.mkdir()
        trial = Trial(fault, place="after", module=5, batch=4, folder=str(folder))
        ended(start(trial, folder, Account(), is_watched=True), folder)
        (path,) = folder.glob("blackbox/*.blackbox")
        tally = judge_mutations(path, count // 2, seed)
        score.right -= len(tally.faults)
        score.faults += tally.faults
        if tally.memory > MOST_MEMORY:
            score.right -= 1
            score.faults.append(f"takes {tally.memory >> 20} MiB more memory")
        told = ", ".join(f"{number:,} {what}" for what, number in sorted(tally.counts.items()))
        print(
            f"     {fault}: {told}; the slowest {tally.slowest:.2f} s, {tally.memory >> 20} MiB more",
            flush=True,
        )
    return score


def _remove(pid: int, top: Path) -> None:
    if os.getpid() == pid:
        shutil.rmtree(top, ignore_errors=True)


def end_as_python(program: Callable[[], object]) -> None:
    """Run a program and end as Python does, except for taking apart all that is imported, which takes a second."""
    code: Any = 0
    try:
        program()
    except SystemExit as left:
        code = left.code
    except BaseException as error:
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    run: Callable[[], object]
    try:
        run = functools.partial(sys.exit, main())
    except Begin as begin:
        run = begin.program if begin.is_whole else functools.partial(end_as_python, begin.program)
    run()
