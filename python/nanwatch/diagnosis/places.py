"""Places that hold state of the program: attributes, globals, variables of closures, buffers."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from types import FunctionType
from typing import Any

MISSING: Any = object()
DEFAULTS = "__defaults__"


@dataclass(frozen=True, slots=True)
class Root:
    """Place that holds state: an attribute of an object or class, a global, a variable of a closure, or a buffer.

    Keeps no object alive, unless `strong` was asked for: `owner` is a weak reference, or a function's globals.
    """

    owner: Any
    name: str | int
    is_buffer: bool = False

    def holder(self) -> Any:
        """Return the object that has the attribute or closure, or the dict of globals; None once it is gone."""
        return self.owner if type(self.owner) is dict else self.owner()

    def get(self) -> Any:
        """Return the value; MISSING where there is none."""
        if type(self.owner) is dict:  # the most common place, at the start of each batch
            return self.owner.get(self.name, MISSING)
        holder = self.owner()
        if type(self.name) is int:
            cells = () if holder is None else holder.__closure__ or ()
            try:
                return cells[self.name].cell_contents
            except (ValueError, IndexError):
                return MISSING
        if holder is None:
            return MISSING
        if self.name == DEFAULTS and type(holder) is FunctionType:
            return holder.__defaults__
        return self._table(holder).get(self.name, MISSING)

    def _table(self, holder: Any) -> Any:
        if type(holder) is dict:
            return holder
        own = attributes_of(holder)
        return own["_buffers"] if self.is_buffer else own

    def set(self, value: Any) -> None:
        """Put the value there, or take away what is there."""
        holder = self.holder()
        if holder is None:
            return
        if type(self.name) is int:
            cell = holder.__closure__[self.name]
            if value is MISSING:
                del cell.cell_contents
            else:
                cell.cell_contents = value
        elif self.name == DEFAULTS and type(holder) is FunctionType:
            holder.__defaults__ = value
        elif isinstance(holder, type):
            if value is MISSING:
                type.__delattr__(holder, str(self.name))
            else:
                type.__setattr__(holder, str(self.name), value)
        elif value is MISSING:
            self._table(holder).pop(self.name, None)
        else:
            self._table(holder)[self.name] = value


class Fixed(Root):
    """A value at no place that is known: it is refilled and not exchanged."""

    def __init__(self, value: Any) -> None:
        object.__setattr__(self, "owner", value)
        object.__setattr__(self, "name", "")
        object.__setattr__(self, "is_buffer", False)

    def get(self) -> Any:
        """Return the value."""
        return self.owner

    def set(self, value: Any) -> None:
        """Leave it."""


def attributes_of(value: Any) -> Any:
    """Return the dict of an object, without asking the object: it may define `__getattribute__`."""
    if isinstance(value, type):
        return type.__getattribute__(value, "__dict__")
    if isinstance(value, threading.local):
        return value.__dict__
    try:
        return object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return {}
