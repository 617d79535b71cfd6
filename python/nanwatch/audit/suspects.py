"""Suspects of an audit: how often in a row a weight must show a fault, and by which module the fault is named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ..util.modules import is_in
from .samples import Key, WeightSample

# Audits in a row in which a weight must be suspected. A head that the loss leaves out, an expert without tokens, a
# branch behind a gain of 0 and a learning rate that warms up are no fault, and are over in fewer.
_NEEDED = {
    "no-gradient": 6,
    "zero-gradient": 6,
    "zero-lr": 5,
    "absorbed": 3,
    "not-in-optimizer": 3,
    "other-module-trained": 3,
    "train-mode-wrong": 3,
}
_NEEDED_ELSE = 2
# Share of a module's elements that need not have a fault of the module: its biases take any update.
_MISSING = {"absorbed": 0.25, "zero-gradient": 0.25}


class Suspect(NamedTuple):
    """A weight that may have a fault of this kind; `label` is None where a module is meant."""

    kind: str
    module: str
    label: str | None
    numbers: Mapping[str, float] = {}


class Suspicions:
    """Counts of how often in a row each weight of one optimizer was suspected of each kind of fault."""

    def __init__(self) -> None:
        self._in_a_row: dict[tuple[str, str, str | None], int] = {}
        self._certain: set[tuple[str, str, str | None]] = set()

    @property
    def is_open(self) -> bool:
        """Return whether a suspicion is neither certain nor gone."""
        return any(key not in self._certain for key in self._in_a_row)

    def add(
        self, suspects: Iterable[Suspect], weights: Iterable[WeightSample]
    ) -> Iterator[tuple[Suspect, int]]:
        """Take the suspects of one audit, and yield the faults that are certain by now, each once: see `gathered`."""
        new = {suspect[:3]: suspect for suspect in suspects}
        self._in_a_row = {key: self._in_a_row.get(key, 0) + 1 for key in new}
        ripe = [
            suspect
            for key, suspect in new.items()
            if key not in self._certain and self._in_a_row[key] >= _NEEDED.get(suspect.kind, _NEEDED_ELSE)
        ]
        self._certain |= {suspect[:3] for suspect in ripe}
        sizes = {weight.key: weight.size for weight in weights}
        trained = {weight.key: weight.size for weight in weights if weight.is_trained}
        for kind in dict.fromkeys(suspect.kind for suspect in ripe):
            alike = [suspect for suspect in ripe if suspect.kind == kind]
            are_trained = all((suspect.module, suspect.label) in trained for suspect in alike)
            yield from gathered(alike, trained if are_trained else sizes)


def ancestors(module: str) -> Iterator[str]:
    """Yield the name of the module and of all that it is in, up to the root."""
    while module:
        yield module
        module = module.rpartition(".")[0]
    yield ""


def gathered(ripe: Sequence[Suspect], weights: Mapping[Key, int]) -> Iterator[tuple[Suspect, int]]:
    """Yield one fault for each largest module whose weights have it: all of these, or nearly all of their elements.

    The number is that of the trained weights that are meant.
    """
    hits = {(suspect.module, suspect.label) for suspect in ripe}
    named: set[tuple[str, str | None]] = set()
    for suspect in ripe:
        module, label, count = suspect.module, suspect.label, 1
        for above in ancestors(module) if label is not None else ():
            inside = {key: size for key, size in weights.items() if is_in(key[0], above)}
            missing = sum(size for key, size in inside.items() if key not in hits)
            if inside and missing <= _MISSING.get(suspect.kind, 0.0) * sum(inside.values()):
                module, label, count = above, None, len(inside)
        # A module of one weight is named with it.
        if label is None and count == 1 and suspect.label is not None:
            module, label = suspect.module, suspect.label
        if (module, label) not in named:
            named.add((module, label))
            yield Suspect(suspect.kind, module, label, suspect.numbers), count
