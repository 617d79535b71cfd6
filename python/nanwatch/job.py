"""The job that this process is one of: its rank there, and how many there are."""

from __future__ import annotations

import os

import torch


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
