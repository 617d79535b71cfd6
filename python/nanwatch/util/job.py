"""The distributed job that this process belongs to: rank, number of processes, and which start of the job this is."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path


def rank_and_world_size() -> tuple[int, int]:
    """Return both as torch.distributed has them, before it is initialized as torchrun has them, else (0, 1)."""
    distributed = sys.modules.get("torch.distributed")  # not imported: a report is read without torch
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1


def rank() -> int:
    """Return the rank of this process, 0 without a job."""
    return rank_and_world_size()[0]


def started_at(pid: int) -> int | None:
    """Return when a process of this machine started, in the kernel's ticks; None where there is none, or a zombie."""
    try:
        # The name of the program, in brackets, may hold anything.
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if words[0] in "ZX" else int(words[19])
    except (OSError, ValueError, IndexError):
        return None


_BEGUN = time.time()


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of a torchrun job, as one of its processes knows it.

    `run_id` is torchrun's rendezvous id. `number` is how many restarts came before, counted by the launcher of this
    node: of several launchers, only the one whose process failed counts. `master` is `host:port` of the store where
    each attempt has a new one, "" where the launcher keeps one. `begun` is in seconds since 1970.
    """

    run_id: str
    number: int
    master: str
    begun: float

    @property
    def key(self) -> tuple[str, str | int]:
        """Return a key that all ranks of an attempt share, and no other attempt has."""
        return self.run_id, self.master or self.number

    def __str__(self) -> str:
        begun = datetime.fromtimestamp(self.begun, timezone.utc)
        return f"attempt {self.number} of run {self.run_id}, begun {begun:%Y-%m-%d %H:%M:%S} UTC"


def current_attempt() -> Attempt | None:
    """Return the attempt that this process belongs to, None where torchrun has set nothing, or nothing readable."""
    get = os.environ.get
    number = get("TORCHELASTIC_RESTART_COUNT", "")
    if not number.isdecimal():
        return None
    # Launchers of one job disagree (torch 2.13): of two on one machine, the one whose worker had failed said 1
    # after the restart and the other 0. So ranks that meet in a new store go by its address.
    has_new_store = get("TORCHELASTIC_USE_AGENT_STORE") == "False" and "MASTER_PORT" in os.environ
    master = f"{get('MASTER_ADDR', '')}:{get('MASTER_PORT')}" if has_new_store else ""
    return Attempt(get("TORCHELASTIC_RUN_ID", ""), int(number), master, _BEGUN)


def store_key() -> str:
    """Return a suffix for keys, so that attempts that meet in one store do not read each other's."""
    attempt = current_attempt()
    return "/0" if attempt is None else "/".join(map(str, attempt.key))


def spell_runs(numbers: Sequence[int]) -> str:
    """Return the first eight runs of sorted numbers as `0-3, 5, 8-9`, and how many numbers more there are."""
    # The numbers of a run are as far from their places in the sequence.
    groups = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in group] for _, group in groups]
    shown = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs[:8]]
    left = sum(map(len, runs[8:]))
    return ", ".join(shown) + (f" and {left} more" if left else "")
