"""Judge `nanwatch.twice` by steps that are not repeatable: whether it names what the chance comes from, and a cure.

    python benchmarks/judge_twice.py                   # all, ten seconds
    python benchmarks/judge_twice.py uuid generator    # those whose names contain one of the words

The steps are in `_chance_sources.py`. Prints a line for each fact that is wrong, and the score. Exit status 1 where one
is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
from _chance_sources import SOURCES, Source
from torch import Tensor, nn

import nanwatch


def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Tensor], Tensor]:
    """Return a training step."""

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def wrong(source: Source) -> Iterator[str]:
    """Yield each fact that a comparison of two runs states otherwise: module, operation, line, cause and cure."""
    model = nn.Sequential(nn.Linear(4, 4), source.part(), nn.Linear(4, 1))
    step = training(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with source.around():
        found = nanwatch.twice(step, batches=[torch.randn(3, 4) for _ in range(2)])
    difference = found.difference
    if difference is None:
        yield "no difference"
        return
    place = difference.operation_module, difference.operation
    if place != (source.module, source.operation):
        yield f"{place[1]} of {place[0]!r}, not {source.operation} of {source.module!r}"
    if not difference.code.endswith("# part"):
        yield f"line: {difference.code}"
    if source.words not in difference.cause:
        yield f"cause: {difference.cause}; {source.words!r} is not in it"
    cures = [one.change for one in found.tried if one.outcome == "equal"]
    if len(cures) != bool(source.cure) or source.cure not in "".join(cures):
        yield f"cures: {cures}, not {source.cure!r}"


def main(words: list[str]) -> int:
    """Judge the chosen sources, and return how many are not named right."""
    chosen = [name for name in SOURCES if not words or any(word in name for word in words)]
    faults = {name: list(wrong(SOURCES[name])) for name in chosen}
    for name, lines in faults.items():
        for line in lines:
            print(f"{name}: {line}")
    bad = sum(map(bool, faults.values()))
    print(f"{len(chosen) - bad} of {len(chosen)} sources of chance are named, with line, cause and cure")
    return bad


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
