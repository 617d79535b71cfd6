"""Readers of the calls of functions: a function is replaced in its own module while somebody reads its calls.

The replacement makes the user's call first, then shows its arguments to the readers. Compiled code calls the function
itself.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch.compiler import is_compiling

from ..numerics.readable import only_our_dispatch
from ..util.visible import suppressing

Reader = Callable[[Any, Any, Any], None]
_replacing = threading.RLock()  # reentrant: the garbage collector may remove a reader anywhere


@contextmanager
def aside() -> Iterator[None]:
    """Compute without a graph and past the user's modes."""
    with torch.no_grad(), only_our_dispatch():
        yield


class _Replacement:
    """A function to put in the place of a module's own, and the readers of its calls."""

    def __init__(self, place: ModuleType, name: str, describe: Any) -> None:
        self.original = original = getattr(place, name)
        self.readers: list[Reader] = []
        readers = self.readers

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            if not is_compiling():
                for reader in tuple(readers):
                    with suppressing(f"a call of {name} could not be read"):
                        reader(describe, args, kwargs)
            return output

        self.function = watched


_replacements: dict[str, _Replacement] = {}


def read_calls(place: ModuleType, name: str, describe: Any, reader: Reader) -> SimpleNamespace:
    """Call `reader` after each call of this function, until `remove()` of what is returned."""
    with _replacing:
        one = _replacements.get(name)
        if one is None or getattr(place, name) not in (one.function, one.original):
            one = _replacements[name] = _Replacement(place, name, describe)
        one.readers.append(reader)
        setattr(place, name, one.function)

    def remove() -> None:
        """Remove the reader, and put the function back after the last one."""
        with _replacing:
            if reader in one.readers:
                one.readers.remove(reader)
            # Another library may have put its own function over this one, which then stays and reads nothing.
            if not one.readers and getattr(place, name) is one.function:
                setattr(place, name, one.original)

    return SimpleNamespace(remove=remove)
