"""One watch, many threads: neither recorder raises into the user's code, and both count every call once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn

import nanwatch

pytestmark = pytest.mark.usefixtures("each_recorder", "switching")


def all_together(*jobs: Callable[[], object]) -> None:
    """Run each job in a thread of its own, from one moment on; raise what the first of them raised."""
    start, errors = threading.Barrier(len(jobs)), []

    def run(job: Callable[[], object]) -> None:
        start.wait(60)
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    if errors:
        raise errors[0]


def test_trainings_in_threads_are_counted_once() -> None:
    """Four threads train one model: as many batches, calls and frames of both phases as an unwatched run makes."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    steps, threads = 40, 4
    with nanwatch.watch(
        model, on_nonfinite="record", rerun=False, forecast=False, gradients=True, max_frames=10_000
    ) as watch:

        def train() -> None:
            for _ in range(steps):
                model(torch.ones(3, 2)).sum().backward()

        all_together(*[train] * threads)
        frames, counters = watch.frames, watch.counters
    batches = steps * threads
    assert watch.batch == batches - 1
    assert counters["calls"] == 4 * batches
    assert Counter(one.batch for one in frames if one.phase == "forward") == dict.fromkeys(range(batches), 4)
    assert sum(one.phase == "backward" for one in frames) == 4 * batches
    assert counters["frames"] == len(frames) == 8 * batches
