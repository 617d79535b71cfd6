"""Causes that `nanwatch.twice` names, and its trial of data loaders: no workers, and the order of seed 0."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from nanwatch.equivalence.trials import TRIALS, explain
from nanwatch.util.place import Place

ITEMS = torch.arange(40.0)


def random_sampler() -> RandomSampler:
    return RandomSampler(ITEMS)  # type: ignore[arg-type]


# How a program makes a loader; those with a random order take it from a generator that each run seeds anew.
MADE: dict[str, Callable[[], DataLoader[torch.Tensor]]] = {
    "options": lambda: DataLoader(
        ITEMS, 4, shuffle=True, num_workers=2, prefetch_factor=4, persistent_workers=True, timeout=60
    ),
    "by position": lambda: DataLoader(ITEMS, 4, True, None, None, 2),
    "a context": lambda: DataLoader(ITEMS, 4, shuffle=True, num_workers=1, multiprocessing_context="fork"),
    "a generator": lambda: DataLoader(ITEMS, 4, shuffle=True, generator=torch.Generator()),
    "a sampler": lambda: DataLoader(ITEMS, 4, sampler=random_sampler()),
    "a sampler by position": lambda: DataLoader(ITEMS, 4, None, random_sampler()),
    "a sampler of batches": lambda: DataLoader(ITEMS, batch_sampler=BatchSampler(random_sampler(), 4, False)),
}


@pytest.mark.parametrize("make", MADE.values(), ids=MADE)
def test_a_loader_is_made_without_workers_and_with_the_order_of_seed_0(
    make: Callable[[], DataLoader[torch.Tensor]],
) -> None:
    """The global generator does not change the order. A note has the place where the program makes the loader."""
    notes: list[str] = []
    with TRIALS["loader"].patch(notes.append):
        torch.seed()
        loader = make()
        # A RandomSampler draws no base seed, so that its order is that of the generator alone.
        first, second = torch.cat(list(loader)), torch.cat(list(loader))
    assert loader.num_workers == 0
    assert [note.partition(" at ")[0] for note in notes] == ["a DataLoader"]
    assert first.sort().values.equal(ITEMS)
    assert not first.equal(ITEMS)
    assert not first.equal(second), "the order of each epoch is another one"
    with TRIALS["loader"].patch(notes.append):
        torch.seed()
        assert torch.cat(list(make())).equal(first)


def test_a_loader_of_a_fixed_order_keeps_it_and_loaders_are_as_before_afterwards() -> None:
    """A sequential sampler has no generator; after the trial, workers are taken again."""
    notes: list[str] = []
    with TRIALS["loader"].patch(notes.append):
        assert torch.cat(list(DataLoader(ITEMS, 4, sampler=SequentialSampler(ITEMS)))).equal(ITEMS)  # type: ignore[arg-type]
    loader = DataLoader(ITEMS, 4, num_workers=2, prefetch_factor=4)
    assert (loader.num_workers, loader.prefetch_factor, loader.generator) == (2, 4, None)
    assert len(notes) == 1


@pytest.mark.parametrize(
    ("operation", "words"),
    [
        ("aten.index_add_.default", "aten.index_add_.default adds with atomics on CUDA"),
        (
            "aten.addmm.default",
            "aten.addmm.default may be computed by another algorithm or split over threads",
        ),
        ("aten.exp.default", "aten.exp.default makes other bits of equal operands"),
        (
            "mine.scan.default",
            "mine.scan.default makes other bits of equal operands; its kernel is not PyTorch's",
        ),
    ],
)
def test_an_operation_that_differs_on_equal_operands_is_explained(operation: str, words: str) -> None:
    """By what is known of its kernels; the first trial is the kernel that PyTorch calls deterministic."""
    one = SimpleNamespace(name=operation, place=None, is_random=False, in_loader=False)
    found: Any = SimpleNamespace(a=one, operand=None, how="results")
    cause, trials = explain(found)
    assert cause.startswith(words)
    assert trials == ["deterministic", "threads"]


def test_a_line_of_a_file_that_is_no_python_has_no_suspects(tmp_path: Path) -> None:
    """A template or a cell of a notebook: that line alone is searched."""
    file = tmp_path / "train.tpl"
    file.write_text("{% for x in data %}\nt = time.time()\n{% endfor %} id(x)\n")
    one = SimpleNamespace(name="aten.mul.Tensor", place=Place(str(file), 2), is_random=False, in_loader=False)
    found: Any = SimpleNamespace(a=one, operand=SimpleNamespace(origin="", allocated=""), how="operands")
    cause, trials = explain(found)
    assert cause == "what it was given was written past PyTorch's dispatcher; look at time.time() in line 2"
    assert trials[0] == "clock"
