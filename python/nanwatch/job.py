"""Which of how many processes of a job this one is."""

from __future__ import annotations

import torch


def place() -> tuple[int, int]:
    """The rank of this process and the number of processes; (0, 1) without a process group."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
