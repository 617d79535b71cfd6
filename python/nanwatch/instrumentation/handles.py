"""Hooks that go with whoever registered them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any


class Handles:
    """What registering hooks returned: taken off by `remove`, or when `owner` is collected."""

    def __init__(self, owner: object, handles: Iterable[Any]) -> None:
        self._handles = list(handles)
        weakref.finalize(owner, _remove, self._handles)

    def remove(self) -> None:
        """Take the hooks off. Does nothing the second time."""
        _remove(self._handles)


def _remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()
