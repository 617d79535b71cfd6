"""Suspicions of one optimizer's steps, until they are certain: one step may have a fault by chance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from ...util.modules import is_in
from .samples import Key
from .view import Suspect, ancestors

# Audits in a row in which a weight must be suspected. A head that the loss leaves out, an expert without tokens, a
# branch behind a gain of 0 and a learning rate that warms up are no fault, and are over in fewer.
_NEEDED = {
    "no-gradient": 6,
    "zero-gradient": 6,
    "zero-lr": 5,
    "absorbed": 3,
    "absorbed:moment": 3,
    "skipped-step": 3,
    "not-in-optimizer": 3,
    "other-module-trained": 3,
    "other-module-trained:copy": 3,
    "wrong-update": 3,
    "train-mode-wrong": 3,
    "master-differs:at-first": 1,
}
_NEEDED_ELSE = 2
# Share of a module's elements that need not have a fault of the module: a bias of 0 takes any update.
_MISSING = {"absorbed": 0.1, "wrong-update": 0.1}
_Whole = tuple[str, str, str | None]


class Fault(NamedTuple):
    """A fault that is certain, of a weight or (`label` None) of all `size` trained weights of a module."""

    kind: str
    module: str
    label: str | None
    size: int
    numbers: Mapping[str, float]


class Suspicions:
    """Counts how often in a row each weight was suspected of each kind of fault."""

    def __init__(self) -> None:
        self._in_a_row: dict[_Whole, int] = {}
        self._told: set[_Whole] = set()

    @property
    def is_open(self) -> bool:
        """Return whether a suspicion is neither certain nor gone."""
        return any(key not in self._told for key in self._in_a_row)

    def add(
        self, suspects: Iterable[Suspect], trained: Mapping[Key, int], all_weights: Mapping[Key, int]
    ) -> Iterator[Fault]:
        """Take the suspects of one audit, and yield the faults that are certain by now, each once."""
        found = {(one.kind, one.module, one.label): one for one in suspects}
        self._in_a_row = {key: self._in_a_row.get(key, 0) + 1 for key in found}
        ripe = [
            one
            for key, one in found.items()
            if key not in self._told and self._in_a_row[key] >= _NEEDED.get(one.kind, _NEEDED_ELSE)
        ]
        self._told |= {(one.kind, one.module, one.label) for one in ripe}
        for kind in dict.fromkeys(one.kind for one in ripe):
            own = [one for one in ripe if one.kind == kind]
            are_trained = all((one.module, one.label) in trained for one in own)
            yield from gathered(own, trained if are_trained else all_weights)


def gathered(ripe: Sequence[Suspect], weights: Mapping[Key, int]) -> Iterator[Fault]:
    """Yield one fault for each largest module whose weights have it: all of these, or nearly all of their elements."""
    hits = {(one.module, one.label) for one in ripe}
    told: set[tuple[str, str | None]] = set()
    for one in ripe:
        module, label, count = one.module, one.label, 1
        for above in ancestors(module) if label is not None else ():
            own = {key: size for key, size in weights.items() if is_in(key[0], above)}
            missing = sum(size for key, size in own.items() if key not in hits)
            if own and missing <= _MISSING.get(one.kind, 0.0) * sum(own.values()):
                module, label, count = above, None, len(own)
        # A module of one weight is named with it.
        if label is None and count == 1 and one.label is not None:
            module, label = one.module, one.label
        if (module, label) not in told:
            told.add((module, label))
            yield Fault(one.kind, module, label, count, one.numbers)
