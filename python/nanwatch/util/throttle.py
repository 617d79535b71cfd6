"""Throttling of work for failures that never end."""

from __future__ import annotations

# A run that goes on may fail for ever. After so many failures re-runs get rarer, so that capsules do not fill a disk.
MANY = 20


def is_due(number: int) -> bool:
    """Return whether the failure of this number, from 1, is examined: the first MANY, then at numbers that double."""
    rounds, rest = divmod(number, MANY)
    return number <= MANY or (rest == 0 and rounds & (rounds - 1) == 0)
