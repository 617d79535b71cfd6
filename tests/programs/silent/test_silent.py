"""The audit on trainings that were written without a look at its rules, and held as it is: MISSED may only shrink."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import nanwatch
from support.netcheck_ranks import free_port

from . import faulty, methods, objectives, unusual  # noqa: F401  # they fill the registers
from .kit import FAULTS, UNUSUAL

# Whether an embedding was frozen on purpose, and whether gradients were cleared on purpose, shows in no step.
MISSED = {"embedding_from_pretrained_is_frozen", "zeroed_at_each_micro_batch"}


def kinds_of(train: Any, *args: Any) -> set[str]:
    """Return the kinds of what the audit says of a training."""
    watches: list[nanwatch.Watch] = []

    @contextlib.contextmanager
    def watch(model: nn.Module) -> Iterator[None]:
        with nanwatch.watch(model, audit=True) as made:
            yield
        watches.append(made)

    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        train(watch, *args)
    return {finding.kind for made in watches for finding in made.updates}


def as_rank(rank: int, port: int, name: str) -> None:
    """Train the faulty form and then its twin; raise where they are not told apart."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo")
    assert kinds_of(FAULTS[name].train, True) & {*FAULTS[name].kinds}
    assert not kinds_of(FAULTS[name].train, False)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (FAULTS[name].ranks > 1)) for name in FAULTS]
)
def test_a_fault_is_named_and_its_twin_is_not(name: str) -> None:
    case = FAULTS[name]
    if case.ranks > 1:
        torch.multiprocessing.spawn(as_rank, (free_port(), name), case.ranks)
        return
    assert bool(kinds_of(case.train, True) & {*case.kinds}) is (name not in MISSED)
    assert not kinds_of(case.train, False)


@pytest.mark.parametrize("name", UNUSUAL)
def test_a_healthy_training_of_unusual_shape_is_silent(name: str) -> None:
    assert not kinds_of(UNUSUAL[name])
