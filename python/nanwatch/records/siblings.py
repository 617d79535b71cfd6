"""Weights that stand out: above what they were, or above their siblings, the same weight of other layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from statistics import median
from typing import TypeAlias

Key: TypeAlias = tuple[str, str]  # module and label

# Adam moves a weight by about the learning rate a step, and the gain of a norm stays below 5 in trained models: eight
# times, three bits, is no healthy training.
_FACTOR = 8
# A bias or a LoRA matrix grows from 0 by any factor. Growth counts from here on.
_LEAST = 0.1
# Fewer have no middle from which one could be far.
_LEAST_SIBLINGS = 4
_NUMBER = re.compile(r"\d+")


def grown_most(first: Mapping[Key, float], latest: Mapping[Key, float]) -> Key | None:
    """Return the weight whose abs max has grown by the largest factor, None where none has grown eight times."""

    def growth(key: Key) -> float:
        return latest[key] / max(first[key], _LEAST)

    grown = max(latest, key=growth, default=None)
    return grown if grown is not None and growth(grown) >= _FACTOR else None


def apart_from_siblings(latest: Mapping[Key, float]) -> Iterator[tuple[float, Key, str, list[float]]]:
    """Yield the weight that is farthest above its siblings, the same weight of other layers, where one is far.

    `latest` has the abs max by module and label. Yields how many times the siblings' median it is (of 0.1 at least),
    its key, the pattern of the siblings' names, and their abs max.
    """
    groups: dict[Key, list[Key]] = {}
    for key in latest:
        groups.setdefault((_NUMBER.sub("*", key[0]), key[1]), []).append(key)
    for (pattern, _), members in groups.items():
        if len(members) < _LEAST_SIBLINGS:
            continue
        key = max(members, key=latest.__getitem__)
        siblings = [latest[member] for member in members if member is not key]
        factor = latest[key] / max(median(siblings), _LEAST)
        if factor >= _FACTOR:
            yield factor, key, pattern, siblings
