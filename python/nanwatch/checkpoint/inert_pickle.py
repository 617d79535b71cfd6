"""Reader of pickles that makes nothing: each object stays a description of the call that would have made it.

Python's own unpickler imports what a pickle names, and calls it. This one goes through the opcodes (`pickletools`, of
the standard library) and builds lists, tuples and `Made`. It hashes and compares nothing, so a pickle of nested tuples
costs no more time than its bytes, and bounds the number of opcodes.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterator
from typing import IO, Any

from .stored import DamagedError

# A tensor takes about 30: enough for 150,000, in 500 MB at most.
_MOST_OPCODES = 5_000_000


# They look like numbers and strings, and stand for objects of the program that wrote them.
_REFUSED = ("EXT1", "EXT2", "EXT4", "PERSID")


class Made:
    """Object that a pickle describes: `of` is the name of what makes it, "" for what is no global name.

    `pairs` were put into it as into a dict, `items` as into a list, and `state` is what it was given at last.
    """

    __slots__ = ("arguments", "items", "of", "pairs", "state")

    def __init__(self, of: str, arguments: tuple[Any, ...] = ()) -> None:
        self.of = of
        self.arguments = arguments
        self.pairs: list[tuple[Any, Any]] = []
        self.items: list[Any] = []
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


class Global(str):
    """Name of a class or a function: "torch._utils._rebuild_tensor_v2"."""

    __slots__ = ()


def load(file: IO[bytes], names: set[str]) -> Any:
    """Return what the next pickle of the file describes, and add the global names in it to `names`.

    Raises DamagedError for what is no whole pickle.
    """
    machine = _Machine(names)
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(file)):
            if count == _MOST_OPCODES:
                raise DamagedError(f"its pickle has more than {_MOST_OPCODES:,} steps")
            if opcode.name == "STOP":
                return machine.stack.pop()
            machine.step(opcode, argument)
    except DamagedError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise DamagedError(f"its pickle is damaged ({type(error).__name__}: {str(error)[:100]})") from None
    raise DamagedError("its pickle ends too early")


class _Machine:
    def __init__(self, names: set[str]) -> None:
        self.stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}
        self._names = names

    def step(self, opcode: Any, argument: Any) -> None:
        name: str = opcode.name
        if (do := _STEPS.get(name)) is not None:
            do(self, argument)
        elif (
            name not in _REFUSED
            and opcode.arg is not None
            and not opcode.stack_before
            and len(opcode.stack_after) == 1
        ):
            self.stack.append(argument)  # a number, a string
        else:
            raise DamagedError(f"its pickle has the step {name}, which checkpoints do not need")

    def mark(self, _: Any) -> None:
        self._marks.append(len(self.stack))

    def since_mark(self) -> list[Any]:
        at = self._marks.pop()
        found = self.stack[at:]
        del self.stack[at:]
        return found

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def constant(self, value: Any) -> Callable[[Any], None]:
        return lambda _: self.push(value)

    def last(self, count: int) -> tuple[Any, ...]:
        if count > len(self.stack):
            raise IndexError("its stack is empty")
        found = tuple(self.stack[len(self.stack) - count :])
        del self.stack[len(self.stack) - count :]
        return found

    def make(self, of: Any, arguments: Any) -> None:
        self.push(
            Made(of if isinstance(of, Global) else "", arguments if isinstance(arguments, tuple) else ())
        )

    def name(self, module: Any, name: Any) -> None:
        found = Global(f"{str(module)[:500]}.{str(name)[:500]}")
        self._names.add(found)
        self.push(found)

    def pop(self, _: Any) -> None:
        if self._marks and self._marks[-1] == len(self.stack):
            self._marks.pop()
        else:
            self.stack.pop()

    def put(self, index: int | None) -> None:
        self._memo[len(self._memo) if index is None else index] = self.stack[-1]

    def set_pairs(self, flat: list[Any]) -> None:
        if isinstance(self.stack[-1], Made):
            self.stack[-1].pairs += zip(flat[::2], flat[1::2], strict=True)

    def add_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if isinstance(target, Made):
            target = target.items
        if not isinstance(target, list):
            raise TypeError("items for what is no list")
        target += items

    def build(self, _: Any) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Made):
            self.stack[-1].state = state

    def dict_of(self, flat: list[Any]) -> None:
        self.push(Made("dict"))
        self.set_pairs(flat)


_STEPS: dict[str, Callable[[_Machine, Any], Any]] = {
    "PROTO": lambda m, _: None,
    "FRAME": lambda m, _: None,
    "MARK": _Machine.mark,
    "POP": _Machine.pop,
    "POP_MARK": lambda m, _: m.since_mark(),
    "DUP": lambda m, _: m.push(m.stack[-1]),
    "NONE": lambda m, _: m.push(None),
    "NEWTRUE": lambda m, _: m.push(True),
    "NEWFALSE": lambda m, _: m.push(False),
    "EMPTY_TUPLE": lambda m, _: m.push(()),
    "EMPTY_LIST": lambda m, _: m.push([]),
    "EMPTY_DICT": lambda m, _: m.push(Made("dict")),
    "EMPTY_SET": lambda m, _: m.push([]),
    "TUPLE": lambda m, _: m.push(tuple(m.since_mark())),
    "TUPLE1": lambda m, _: m.push(m.last(1)),
    "TUPLE2": lambda m, _: m.push(m.last(2)),
    "TUPLE3": lambda m, _: m.push(m.last(3)),
    "LIST": lambda m, _: m.push(m.since_mark()),
    "FROZENSET": lambda m, _: m.push(m.since_mark()),
    "DICT": lambda m, _: m.dict_of(m.since_mark()),
    "APPEND": lambda m, _: m.add_items([m.stack.pop()]),
    "APPENDS": lambda m, _: m.add_items(m.since_mark()),
    "ADDITEMS": lambda m, _: m.add_items(m.since_mark()),
    "SETITEM": lambda m, _: m.set_pairs(list(m.last(2))),
    "SETITEMS": lambda m, _: m.set_pairs(m.since_mark()),
    "GET": lambda m, at: m.push(m._memo[at]),
    "BINGET": lambda m, at: m.push(m._memo[at]),
    "LONG_BINGET": lambda m, at: m.push(m._memo[at]),
    "PUT": _Machine.put,
    "BINPUT": _Machine.put,
    "LONG_BINPUT": _Machine.put,
    "MEMOIZE": _Machine.put,
    "GLOBAL": lambda m, both: m.name(*both.split(" ", 1)),
    "STACK_GLOBAL": lambda m, _: m.name(*m.last(2)),
    "REDUCE": lambda m, _: m.make(*m.last(2)),
    "NEWOBJ": lambda m, _: m.make(*m.last(2)),
    "NEWOBJ_EX": lambda m, _: m.make(*m.last(3)[:2]),
    "BUILD": _Machine.build,
    "BINPERSID": lambda m, _: m.push(Made("persistent", m.last(1))),
}
