"""The distributed job that this process belongs to: its rank, and how many processes there are."""

from __future__ import annotations

import os
import sys


def rank_and_world_size() -> tuple[int, int]:
    """Return both as torch.distributed has them, before it is initialized as torchrun has them, else (0, 1)."""
    # Not imported: a report is read without torch.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1


def rank() -> int:
    """Return the rank of this process, 0 without a job."""
    return rank_and_world_size()[0]
