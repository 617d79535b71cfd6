"""Ranks of a job over gloo, of which one dies or stops: the black boxes say which, and where the others wait."""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from _box_account import Account
from torch import Tensor, nn

import nanwatch
from nanwatch.blackbox.job import job_text, read_job

RANKS = "ranks"
_DEATHS = ("SIGKILL", "SIGSEGV", "stops")
_LIMIT = 60.0


class _Exchange(nn.Module):
    """Sums its input over the ranks, and first meets the fault."""

    def __init__(self, account: Account, fatal: tuple[int, str] | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))
        self._account = account
        self._fatal = fatal
        self._calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self._account.begin(0)
        self._calls += 1
        if self._fatal is not None and self._calls == self._fatal[0]:
            self._account.meet()
            if self._fatal[1] == "stops":
                time.sleep(600)
            os.kill(os.getpid(), getattr(signal, self._fatal[1]))
        total = x.detach().clone()
        dist.all_reduce(total)
        self._account.end()
        return total * self.weight


def judge_ranks(top: Path, seed: int) -> list[str]:
    """Run a job in which a random rank dies in a random call. Return what its black boxes say wrongly."""
    dice = random.Random(seed)
    size = dice.choice((2, 3, 4))
    victim, place = dice.randrange(size), dice.choice(("first", "second"))
    death, call = _DEATHS[seed % len(_DEATHS)], dice.randrange(2, 12)
    folder = Path(tempfile.mkdtemp(dir=top))
    accounts = [Account() for _ in range(size)]
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            try:
                fatal = (call, death) if rank == victim else None
                _rank(rank, size, folder, accounts[rank], place, fatal)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        pids.append(pid)
    end = time.monotonic() + _LIMIT
    while not accounts[victim].is_met and time.monotonic() < end:
        time.sleep(0.01)
    # The others come to their collective.
    while time.monotonic() < end and not all(
        account.stacks() and next(iter(account.stacks().values())) for account in accounts
    ):
        time.sleep(0.01)
    time.sleep(0.1)
    if death != "stops":
        os.waitpid(pids[victim], 0)
    job = read_job(folder)
    text = job_text(job)
    faults = []
    if [report.rank for report in job.reports] != list(range(size)):
        faults.append(f"has ranks {[report.rank for report in job.reports]} of {size}")
    elif death == "stops":
        faults += [f"rank {one.rank} {one.end}" for one in job.reports if one.end != "runs"]
    else:
        if job.first is None or job.first.rank != victim:
            faults.append(f"first is {job.first and job.first.rank} for {victim}")
        how = "signal" if death == "SIGSEGV" else "unknown"
        if job.reports[victim].end != how:
            faults.append(f"the end is {job.reports[victim].end} for {how}")
    for report in job.reports:
        call_under_way = report.under_way
        # A rank whose peer died may have met an error of gloo, and so have left its module.
        if call_under_way is None and (report.rank == victim or death == "stops"):
            faults.append(f"rank {report.rank} is in no module")
        if call_under_way is not None and call_under_way.module != place:
            faults.append(f"rank {report.rank} is in {call_under_way.module} for {place}")
    for pid, rank in zip(pids, range(size), strict=True):
        if rank != victim or death == "stops":
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    shutil.rmtree(folder)
    return [f"{death} of rank {victim} of {size} in call {call} of {place}: {one}\n{text}" for one in faults]


def _rank(
    rank: int, size: int, folder: Path, account: Account, place: str, fatal: tuple[int, str] | None
) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="judge", MASTER_PORT=folder.name)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    modules = {name: _Exchange(account, fatal if name == place else None) for name in ("first", "second")}
    model = nn.Sequential()
    for name, module in modules.items():
        model.add_module(name, module)
        model.add_module(f"{name}_linear", nn.Linear(16, 16))
    nanwatch.watch(model, output_dir=folder)
    for _ in range(1000):
        model(torch.ones(4, 16)).mean().backward()
