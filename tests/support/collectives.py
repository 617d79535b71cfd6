"""How many collectives were issued, and what was sent from rank to rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


class Counted:
    """Traffic of a block: the backend's own count of collectives, and the profiler, which sees what is behind it.

    The sequence number of a gloo group goes up with each collective, whoever issues it, also the reducer in C++. The
    profiler names them, and the sends and receives between two ranks.
    """

    def __init__(self) -> None:
        self.collectives: list[int] = []
        self.events: Counter[str] = Counter()


def sequence_numbers() -> list[int]:
    groups = dist.distributed_c10d._world.pg_map
    return [group._get_sequence_number_for_group() for group in groups]


@contextmanager
def counting() -> Iterator[Counted]:
    counted = Counted()
    before = sequence_numbers()
    with torch.profiler.profile() as profile:
        yield counted
    counted.collectives = [now - then for now, then in zip(sequence_numbers(), before, strict=True)]
    for event in profile.events():
        if event.name.startswith(("gloo:", "c10d::")):
            counted.events[event.name] += 1
