"""Throttling of work for failures that never end."""

from __future__ import annotations

from nanwatch.util.visible import MANY, is_due


def test_after_many_the_numbers_double() -> None:
    """All of the first MANY, then MANY times a power of two."""
    due = [number for number in range(1, 10 * MANY) if is_due(number)]
    assert due == [*range(1, MANY + 1), 2 * MANY, 4 * MANY, 8 * MANY]
