"""The job that this process is one of: its rank there, how many there are, and which attempt of it this is."""

from __future__ import annotations

import os
import time

import torch

from ..report.attempt import Attempt
from ..report.finding import Finding
from ..report.frame import Frame
from ..report.report import Report

_BEGUN = time.time()


def place() -> tuple[int, int]:
    """`(rank, number of processes)`: of torch.distributed, and until that has begun as torchrun says; else (0, 1)."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1


def rank() -> int:
    """The rank."""
    return place()[0]


def attempt() -> Attempt | None:
    """The start of an elastic job that this process belongs to; None where torchrun has not started it."""
    return Attempt.of(os.environ, _BEGUN)


def report_of(
    frames: tuple[Frame, ...],
    finding: Finding | None = None,
    batch: int | None = None,
    parameter_mesh: tuple[str, ...] = (),
) -> Report:
    """A report of this process, which says where in the job it is."""
    return Report(frames, finding, batch, rank(), parameter_mesh, attempt())
