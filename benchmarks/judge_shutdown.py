"""Kills a process of a job at a random moment, and expects the others to end as they do unwatched.

    OMP_NUM_THREADS=1 python benchmarks/judge_shutdown.py [--trials 100] [--seed 0] [-k loader]

A trial runs a job twice, unwatched and watched. A job is ranks over gloo, ranks of which one fails and asks the others,
a training with DataLoader workers, or one whose webhook gets no answer. The victim gets SIGKILL, or SIGTERM with and
without a handler. A trial is right if the others end as they do unwatched: within the bound, with the same statuses.
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import gc
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # DistributedDataParallel imports it, which takes 4 s in each process
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader

import nanwatch

JOBS = ("ranks", "agreement", "loader", "webhook")
DEATHS = ("SIGKILL", "SIGTERM", "handled SIGTERM")
# Seconds: the latest kill, the length of a training that nobody disturbs, and the time that all have to end, on a busy
# machine. A worker of a DataLoader asks every 5 s for its parent, a webhook has 5 s at the end, and gloo 8 s here.
_LATEST, _LENGTH, _BOUND = 1.5, 60.0, 60.0
_HANDLED = 7
_BECOME_SUBREAPER = 36


class Exchange(nn.Module):
    """Sums its input over the ranks."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.detach().clone()
        dist.all_reduce(total)
        return x + total


class Spoiler(nn.Module):
    """Makes a nan in chosen calls."""

    def __init__(self, calls: range) -> None:
        super().__init__()
        self.calls = calls
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return x * float("nan") if self.num_calls in self.calls else x


class Numbers(torch.utils.data.Dataset[Tensor]):
    """Rows for ever."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((8,), index % 10 / 10)


class Trial(NamedTuple):
    """A job, whom to kill in it, how, and when."""

    job: str
    death: str
    size: int
    victim: int
    moment: float
    fails_at: int

    @classmethod
    def of(cls, job: str, seed: int) -> Trial:
        dice = random.Random(seed)
        size = dice.choice((2, 3)) if job in ("ranks", "agreement") else 1
        # A training with a DataLoader has two workers.
        victim = dice.randrange(3 if job == "loader" else size)
        return cls(job, dice.choice(DEATHS), size, victim, dice.uniform(0.0, _LATEST), dice.randrange(2, 60))


class Outcome(NamedTuple):
    """Exit statuses of the victim and of the others, as far as their parent is the judge, and how many did not end.

    The victim has none if it had ended before the kill.
    """

    victim: int | None
    others: list[int]
    num_left: int
    seconds: float
    output: str


def train(trial: Trial, rank: int, port: int, folder: Path, ready: int, is_watched: bool) -> int:
    """Be a process of the job, which writes to `ready` after its first step. Returns its exit status."""
    told = []

    def end(number: int, frame: Any) -> None:
        told.append(number)
        raise SystemExit(_HANDLED)

    if trial.death.startswith("handled"):
        signal.signal(signal.SIGTERM, end)
    calls = {"agreement": range(trial.fails_at, sys.maxsize), "webhook": range(5, sys.maxsize, 5)}.get(
        trial.job, range(0)
    )
    fails = Spoiler(calls if trial.job != "agreement" or rank == trial.fails_at % trial.size else range(0))
    model: nn.Module = nn.Sequential(nn.Linear(8, 8), fails, nn.Linear(8, 8))
    if trial.size > 1:
        method = f"tcp://127.0.0.1:{port}"
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(trial.size))
        dist.init_process_group("gloo", method, timedelta(seconds=8), trial.size, rank)
        model = nn.parallel.DistributedDataParallel(nn.Sequential(model, Exchange()))
    if is_watched:
        options: dict[str, Any] = {"output_dir": folder} if trial.fails_at % 2 else {}
        if trial.job == "webhook":
            options |= {
                "on_nonfinite": "record",
                "sinks": f"webhook:http://127.0.0.1:{port}/",
                "log_every": 2,
            }
        nanwatch.watch(model, gradients=True, peer_timeout=4.0, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    workers = 2 if trial.job == "loader" else 0
    begun = time.monotonic()
    for step, x in enumerate(DataLoader(Numbers(), batch_size=4, num_workers=workers)):
        if step == 1:
            os.write(ready, b"1")
            begun = time.monotonic()
        if told or time.monotonic() > begun + _LENGTH:
            break
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
    return _HANDLED if told else 0


def run(trial: Trial, is_watched: bool, top: Path) -> Outcome:
    """Run the job once and kill the victim. A process of the job leaves by SystemExit, and ends as Python does."""
    folder = Path(tempfile.mkdtemp(dir=top))
    # A webhook posts to this server, which answers nothing: connections wait in its queue.
    server = socket.create_server(("127.0.0.1", 0))
    port = server.getsockname()[1]
    if trial.size > 1:
        server.close()
    ready, set_ready = os.pipe()
    processes = []
    for rank in range(trial.size):
        pid = os.fork()
        if pid == 0:
            server.close()
            with (folder / f"output-{rank}").open("w") as file:
                os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
            os.environ["XDG_STATE_HOME"] = str(folder)
            faulthandler.dump_traceback_later(_BOUND - 2.0, exit=False)
            sys.exit(train(trial, rank, port, folder, set_ready, is_watched))
        processes.append(pid)
    os.close(set_ready)
    for _ in range(trial.size):
        os.read(ready, 1)
    os.close(ready)
    if trial.job == "loader":
        processes += children(processes[0])
    time.sleep(trial.moment)
    victim = processes[trial.victim % len(processes)]
    killed = time.monotonic()
    is_met = is_running(victim)
    if is_met:
        os.kill(victim, getattr(signal, trial.death.split()[-1]))
    statuses: dict[int, int] = {}
    while time.monotonic() < killed + _BOUND:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid:
            statuses[pid] = os.waitstatus_to_exitcode(status)
        else:
            time.sleep(0.01)
    seconds = time.monotonic() - killed
    left = children(os.getpid())
    for pid in left:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    server.close()
    # The child of a re-run has no status of its own to keep.
    others = sorted(status for pid, status in statuses.items() if pid in processes and pid != victim)
    output = "".join(file.read_text()[-3000:] for file in sorted(folder.glob("output-*")))
    return Outcome(statuses.get(victim) if is_met else None, others, len(left), seconds, output)


def become_subreaper() -> None:
    """Let processes whose parent was killed become children of this one."""
    ctypes.CDLL(None).prctl(_BECOME_SUBREAPER, 1, 0, 0, 0)


def is_running(pid: int) -> bool:
    """Return whether a process has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def main() -> None:
    """Run the trials."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-k", choices=JOBS, help="trials of this job only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    nanwatch.watch(nn.Identity(), enabled=False)  # imports what a watch needs
    become_subreaper()
    gc.freeze()  # else each process ends with a collection of all that is imported here
    top = Path(tempfile.mkdtemp())
    wrong, hangs, slowest = 0, 0, [0.0, 0.0]
    for number in range(options.trials):
        job = options.k or JOBS[number % len(JOBS)]
        trial = Trial.of(job, options.seed + number)
        outcomes = []
        for is_watched in (False, True):
            outcomes.append(run(trial, is_watched, top))
            if outcomes[-1].num_left == 0:
                slowest[is_watched] = max(slowest[is_watched], outcomes[-1].seconds)
        unwatched, watched = outcomes
        # Gloo's own threads may keep a rank from ending, watched or not, after a peer has left in the middle.
        is_right = unwatched.num_left == watched.num_left and unwatched.others == watched.others
        # A rank that fails may have ended before the kill, or be about to.
        if None not in (unwatched.victim, watched.victim) and job != "agreement":
            is_right = is_right and unwatched.victim == watched.victim
        wrong += not is_right
        hangs += is_right and watched.num_left > 0
        print(
            number,
            "right" if is_right else "WRONG",
            trial,
            *(f"{(*outcome[:3],)} in {outcome.seconds:.1f} s" for outcome in outcomes),
            flush=True,
        )
        if not is_right:
            print(*(outcome.output for outcome in outcomes), sep="\n--- watched ---\n")
    shutil.rmtree(top)
    print(
        f"{options.trials} trials, {wrong} wrong; in {hangs} of the others ranks hung unwatched and watched; the"
        f" slowest end came {slowest[0]:.1f} s after the kill unwatched, {slowest[1]:.1f} s watched"
    )
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
