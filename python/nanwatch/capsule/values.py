"""Arguments of a call as plain containers that `torch.load(weights_only=True)` reads, and back.

Tensors, None, bool, int, float, str, torch.dtype, torch.device and torch.Size stay as they are, and so do lists, tuples
and dicts of them. A subclass of one of them is stored as its base. Anything else is a dict whose key "nanwatch" says
what it is:

    {"nanwatch": "structure", "module": …, "class": …, "fields": {…}}   a dataclass, ModelOutput or named tuple
    {"nanwatch": "slice", "parts": (start, stop, step)}
    {"nanwatch": "ellipsis"}
    {"nanwatch": "dict", "items": [(key, value), …]}                     a dict that has the key "nanwatch" itself
    {"nanwatch": "left out", "what": …, "type": …, "bytes": …, "why": …}

Decoding imports, calls and looks up nothing: a class is a name, until `Structure.build` is asked for it.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ..numerics.readable import type_name
from ..recording.walk import spell_key
from ..util.visible import visible

MARK = "nanwatch"
_MAX_DEPTH = 32  # the depth that a watch walks
_MAX_VALUES = 1_000_000  # a thousand sentences of token numbers in Python lists; beyond that a value is data
_MAX_BITS = 1024  # of an int: the unpickler of torch.load reads no more than twice as many
_BASES: tuple[tuple[type, Any], ...] = (
    (bool, bool),
    (int, int.__index__),
    (float, float.__float__),
    (str, str.__str__),
)
_LEAVES = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size, Tensor)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A value that is not in the capsule: what it was, of which type, how many bytes if known, and why."""

    what: str
    type: str
    bytes: int | None
    why: str

    def __str__(self) -> str:
        size = "" if self.bytes is None else f", {self.bytes:,} bytes"
        return visible(f"{self.what} ({self.type}{size}): {self.why}")

    def encoded(self) -> dict[str, Any]:
        """Return the value as plain containers."""
        return {MARK: "left out", **asdict(self)}


@dataclass(frozen=True, slots=True)
class Structure:
    """A dataclass, ModelOutput or named tuple as it is read: the name of its class and its fields, no instance."""

    module: str
    class_name: str
    fields: Mapping[str, Any]

    def build(self) -> Any:
        """Make an instance with these fields. Raise LookupError with the reason when there is no such class.

        The class is looked up among the modules that this process has imported, past any `__getattr__` of theirs,
        and filled without `__init__` or `__post_init__`: a name out of a file decides nothing but which type this is.
        """
        kind: Any = sys.modules.get(self.module)
        for part in self.class_name.split("."):
            kind = vars(kind).get(part) if isinstance(kind, ModuleType | type) else None
        names = _field_names(kind) if isinstance(kind, type) else None
        if names is None or set(names) != set(self.fields):
            reason = "no such class is imported" if kind is None else "it has other fields"
            raise LookupError(f"{self.module}.{self.class_name}: {reason}")
        if issubclass(kind, tuple):
            return tuple.__new__(kind, [self.fields[name] for name in names])
        try:
            is_dict = issubclass(kind, OrderedDict)  # as a ModelOutput is, of its fields that are not None
            instance: Any = OrderedDict.__new__(kind) if is_dict else object.__new__(kind)
            for name in names:
                object.__setattr__(instance, name, self.fields[name])
                if is_dict and self.fields[name] is not None:
                    OrderedDict.__setitem__(instance, name, self.fields[name])
        except (TypeError, AttributeError) as error:
            raise LookupError(f"{self.module}.{self.class_name}: {error}") from None
        return instance


def _field_names(kind: type) -> tuple[str, ...] | None:
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    names = getattr(kind, "_fields", None) if issubclass(kind, tuple) else None
    return names if isinstance(names, tuple) and all(isinstance(name, str) for name in names) else None


class Encoder:
    """Encodes values. `keep(x, label)` returns what stands for a tensor. `left_out` lists what could not be kept."""

    def __init__(self, keep: Callable[[Tensor, str], Any]) -> None:
        self.left_out: list[LeftOut] = []
        self._keep = keep
        self._num_values = 0

    def encode(self, value: Any, label: str, inside: tuple[int, ...] = ()) -> Any:
        """Return the value as plain containers, with parts labelled as in a record. Never raises for a value."""
        self._num_values += 1
        why = ""
        if self._num_values > _MAX_VALUES:
            why = f"the call has more than {_MAX_VALUES:,} values"
        elif isinstance(value, Tensor):
            return self._keep(value, label)
        elif _is_leaf(value):
            return _as_base(value)
        elif value is ...:
            return {MARK: "ellipsis"}
        elif len(inside) == _MAX_DEPTH:
            why = f"nested deeper than {_MAX_DEPTH}"
        elif id(value) in inside:
            why = "contains itself"
        else:
            try:
                return self._encode_container(value, label, (*inside, id(value)))
            except _LeaveOutError as error:
                why = str(error)
            except (
                Exception
            ) as error:  # a container of the user's own may do anything when asked for its items
                why = f"raised {type(error).__name__} when it was read"
        missing = LeftOut(label, type_name(value), None, why)
        self.left_out.append(missing)
        return missing.encoded()

    def _encode_container(self, value: Any, label: str, inside: tuple[int, ...]) -> Any:
        def part(name: object, item: Any) -> Any:
            return self.encode(item, f"{label}[{name}]", inside)

        kind = type(value)
        if isinstance(value, slice):
            names = ("start", "stop", "step")
            return {MARK: "slice", "parts": tuple(part(name, getattr(value, name)) for name in names)}
        if (field_names := _field_names(kind)) is not None:
            content = {name: part(name, getattr(value, name)) for name in field_names}
            return {
                MARK: "structure",
                "module": kind.__module__,
                "class": kind.__qualname__,
                "fields": content,
            }
        if isinstance(value, tuple | list):
            items = [part(number, item) for number, item in enumerate(value)]
            return tuple(items) if isinstance(value, tuple) else items
        if not isinstance(value, Mapping):
            raise _LeaveOutError("a capsule holds tensors, plain values and containers of them")
        if not all(map(_is_key, value)):
            raise _LeaveOutError("it has keys that are no plain values")
        pairs = {_as_base(key): part(spell_key(key), value[key]) for key in value}
        return {MARK: "dict", "items": list(pairs.items())} if MARK in pairs else pairs


class _LeaveOutError(Exception):
    """Reason why a value is left out."""


def _is_leaf(value: Any) -> bool:
    is_long = isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > _MAX_BITS
    return isinstance(value, _LEAVES) and not is_long


def _as_base(value: Any) -> Any:
    """Return an instance of a subclass, such as an enum, as its base; the pickle would name its class."""
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(map(_as_base, value))
    for kind, convert in _BASES:
        if isinstance(value, kind):
            return convert(value)
    return value


def _is_key(key: Any) -> bool:
    return all(map(_is_key, key)) if type(key) is tuple else _is_leaf(key) and not isinstance(key, Tensor)


def decode(value: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    """Return what an Encoder was given: a dataclass or named tuple as a Structure, what was left out as a LeftOut.

    `done` has the containers by id, because a few lists of a stranger may hold each other a billion times. Raises
    ValueError for a mark that no Encoder makes.
    """
    if type(value) not in (list, tuple, dict):
        return value
    if id(value) not in done:
        done[id(value)] = value, _decoded(value, done)
    return done[id(value)][1]


def _decoded(value: Any, done: dict[int, tuple[Any, Any]]) -> Any:
    if not isinstance(value, dict):
        return type(value)(decode(item, done) for item in value)
    match value:
        case {"nanwatch": "ellipsis"}:
            return ...
        case {"nanwatch": "slice", "parts": (start, stop, step)}:
            return slice(decode(start, done), decode(stop, done), decode(step, done))
        case {"nanwatch": "dict", "items": list(pairs)}:
            return {key: decode(item, done) for key, item in pairs}
        case {"nanwatch": "structure", "module": str(module), "class": str(name), "fields": dict(content)}:
            return Structure(module, name, {str(key): decode(item, done) for key, item in content.items()})
        case {"nanwatch": "left out", "what": str(what), "type": str(kind), "bytes": size, "why": str(why)}:
            return LeftOut(what, kind, size if type(size) is int else None, why)
    if MARK in value:
        raise ValueError(f"it holds {str(value)[:60]!r}, whose key {MARK!r} has no meaning")
    return {key: decode(item, done) for key, item in value.items()}
