"""Reader of pickles that makes nothing: each object stays a description of the call that would have made it.

Python's unpickler, in its form in Python, reads the opcodes. Those that import, call, or fill a dict or a set are
replaced, so nothing is imported, called or hashed: a pickle of nested tuples costs no more time than its bytes.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable, Iterator
from typing import IO, Any

from .stored import DamagedError

_UNPICKLER: Any = pickle._Unpickler  # its steps can be replaced, those in C cannot
# A tensor takes about 30: enough for 150,000, in 500 MB at most.
_MOST_OPCODES = 5_000_000
_DAMAGED = (
    *(pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, LookupError, MemoryError),
    *(TypeError, ValueError, struct.error),
)


class Made:
    """Object that a pickle describes: `of` is the name of what makes it, "" for what is no global name.

    `pairs` were put into it as into a dict, `items` as into a list, and `state` is what it was given at last.
    """

    __slots__ = ("append", "arguments", "extend", "items", "of", "pairs", "state")

    def __init__(self, of: str, arguments: tuple[Any, ...] = ()) -> None:
        self.of = of
        self.arguments = arguments
        self.pairs: list[tuple[Any, Any]] = []
        self.items: list[Any] = []
        self.append, self.extend = self.items.append, self.items.extend
        self.state: Any = None

    def members(self) -> Iterator[tuple[Any, Any]]:
        """Yield names and values of what it holds as a dict, or as attributes."""
        yield from self.pairs
        for one in self.state if isinstance(self.state, tuple) else (self.state,):
            if isinstance(one, Made):
                yield from one.pairs

    def __getitem__(self, name: str) -> Any:
        """Return the value of that name. Raises DamagedError without one."""
        for key, value in self.members():
            if isinstance(key, str) and key == name:
                return value
        raise DamagedError(f"a pickled {self.of[-60:]} has no {name!r}")

    def __setitem__(self, name: Any, value: Any) -> None:
        self.pairs.append((name, value))


class Global(str):
    """Name of a class or a function: "torch._utils._rebuild_tensor_v2"."""

    __slots__ = ()


def load(file: IO[bytes], names: set[str]) -> Any:
    """Return what the next pickle of the file describes, and add the global names in it to `names`.

    Raises DamagedError for what is no whole pickle.
    """
    try:
        return _Reader(file, names).load()
    except DamagedError:
        raise
    except _DAMAGED as error:
        raise DamagedError(f"its pickle is damaged ({type(error).__name__}: {str(error)[:100]})") from None


class _Reader(_UNPICKLER):  # type: ignore[misc]
    def __init__(self, file: IO[bytes], names: set[str]) -> None:
        super().__init__(file, encoding="latin-1")
        self._names = names
        self.dispatch = _Steps(_STEPS)

    def find_class(self, module: str, name: str) -> Global:
        found = Global(f"{module[:500]}.{name[:500]}")
        self._names.add(found)
        return found

    def persistent_load(self, pid: Any) -> Made:
        return Made("persistent", (pid,))

    def load_made(self) -> None:
        of, arguments = self.stack[-2:]
        is_named, are_arguments = isinstance(of, Global), isinstance(arguments, tuple)
        self.stack[-2:] = [Made(of if is_named else "", arguments if are_arguments else ())]

    def load_made_by_names(self) -> None:
        del self.stack[-1]
        self.load_made()

    def load_state(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Made):
            self.stack[-1].state = state

    def load_dict(self) -> None:
        flat = self.pop_mark()
        self.append(made := Made("dict"))
        made.pairs += zip(flat[::2], flat[1::2], strict=True)

    def load_items(self) -> None:
        items = self.pop_mark()
        self.stack[-1].extend(items)


class _Steps(dict[int, Callable[[Any], None]]):
    """Steps by their opcodes, of which so many may be asked for."""

    left = _MOST_OPCODES

    def __getitem__(self, opcode: int) -> Callable[[Any], None]:
        self.left -= 1
        if self.left < 0 or opcode not in self:
            what = f"has the step {opcode}" if self.left >= 0 else f"has more than {_MOST_OPCODES:,} steps"
            raise DamagedError(f"its pickle {what}, which no checkpoint needs")
        return super().__getitem__(opcode)


_STEPS: dict[int, Callable[[Any], None]] = {
    **_UNPICKLER.dispatch,
    **{code[0]: _Reader.load_made for code in (pickle.REDUCE, pickle.NEWOBJ)},
    **{code[0]: _Reader.load_items for code in (pickle.ADDITEMS, pickle.APPENDS)},
    pickle.NEWOBJ_EX[0]: _Reader.load_made_by_names,
    pickle.BUILD[0]: _Reader.load_state,
    pickle.DICT[0]: _Reader.load_dict,
    pickle.EMPTY_DICT[0]: lambda reader: reader.append(Made("dict")),
    pickle.EMPTY_SET[0]: lambda reader: reader.append([]),
    pickle.FROZENSET[0]: lambda reader: reader.append(reader.pop_mark()),
}
# They stand for objects of the program that wrote them, or make one of a class.
for _code in (pickle.EXT1, pickle.EXT2, pickle.EXT4, pickle.PERSID, pickle.INST, pickle.OBJ):
    del _STEPS[_code[0]]
