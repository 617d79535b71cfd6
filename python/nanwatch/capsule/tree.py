"""Arguments of a call as a tree for JSON, and back.

    null, true, 3, 1.5, "text"      themselves
    {"float": "nan"}                also "inf" and "-inf", which JSON has no number for
    {"tensor": NAME}                a tensor that lies elsewhere, by its name there
    {"tuple": […]}, {"list": […]}
    {"dict": [[KEY, VALUE], …]}     any mapping; the keys are trees too
    {"structure": {"kind": …, "module": …, "class": …, "fields": [[FIELD, VALUE], …]}}
    {"dtype": "float16"}, {"device": "cuda:0"}, {"size": [2, 3]}, {"slice": [START, STOP, STEP]}, {"ellipsis": true}
    {"left out": NAME}              what none of these can hold

Nothing of a tree is imported, called or looked up when it is read: a class is a name, until `build` is asked for it.
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from math import isfinite
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ..numerics.readable import type_name
from ..recording.walk import spell_key
from ..util import reading
from ..util.reading import fail, shorten
from ..util.visible import visible

Json: TypeAlias = Any
Kind: TypeAlias = Literal["dataclass", "named tuple"]

# The depth that a watch walks. A reader allows twice that, for writers with another limit.
MAX_DEPTH = 32
# A thousand sentences of token numbers in Python lists; beyond that a value is data, and its JSON tens of megabytes.
MAX_VALUES = 1_000_000
_MAX_BITS = 1024  # of an int; Python does not read back one of more than 4300 digits
_MAX_CHARACTERS = 1 << 16
_FLOATS = ("nan", "inf", "-inf")
_DEVICE = re.compile(r"[a-z]{1,20}(:[0-9]{1,4})?")
DTYPES = {str(x).removeprefix("torch."): x for x in vars(torch).values() if isinstance(x, torch.dtype)}


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


@dataclass(frozen=True, slots=True)
class Structure:
    """A dataclass, ModelOutput or named tuple as it is read: the name of its class and its fields, no instance."""

    kind: Kind
    module: str
    class_name: str
    fields: Mapping[str, Any]

    def build(self) -> Any:
        """Make an instance with these fields. Raise LookupError with the reason when there is no such class.

        The class is looked up among the modules that this process has imported, past any `__getattr__` of theirs,
        and filled without `__init__` or `__post_init__`: a name out of a file decides nothing but which type this is.
        """
        kind = _find_class(self.module, self.class_name)
        names = _field_names(kind) if isinstance(kind, type) else None
        if names is None or set(names) != set(self.fields):
            what = "no such class is imported" if kind is None else "it has other fields"
            raise LookupError(f"{self.module}.{self.class_name}: {what}")
        if issubclass(kind, tuple):
            return tuple.__new__(kind, [self.fields[name] for name in names])
        try:
            made = next(base for base in _BASES if issubclass(kind, base)).__new__(kind)
            for name in names:
                object.__setattr__(made, name, self.fields[name])
                # A ModelOutput is also a dict of its fields that are not None.
                if isinstance(made, OrderedDict) and self.fields[name] is not None:
                    OrderedDict.__setitem__(made, name, self.fields[name])
        except (TypeError, AttributeError) as error:
            raise LookupError(f"{self.module}.{self.class_name}: {error}") from None
        return made


_BASES: tuple[Any, ...] = (OrderedDict, object)


def _find_class(module: str, name: str) -> Any:
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    return found


def _field_names(kind: type) -> tuple[str, ...] | None:
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    names = getattr(kind, "_fields", None) if issubclass(kind, tuple) else None
    return names if isinstance(names, tuple) and all(isinstance(name, str) for name in names) else None


class Writer:
    """Makes trees. `keep(x, label)` takes a tensor, `leave_out` what cannot be kept; both give a name for it."""

    def __init__(self, keep: Callable[[Tensor, str], str], leave_out: Callable[[LeftOut], str]) -> None:
        self._keep = keep
        self._take_note = leave_out
        self._num_values = 0

    def write(self, value: Any, label: str) -> Json:
        """Return the tree of `value`, with parts labelled as in a record. Never raises for a value."""
        return self._write(value, label, ())

    def _write(self, value: Any, label: str, inside: tuple[int, ...]) -> Json:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            return self._leave_out(value, label, f"the call has more than {MAX_VALUES:,} values")
        if isinstance(value, Tensor):
            return {"tensor": self._keep(value, label)}
        leaf = _leaf(value)
        if leaf is not _NO_LEAF:
            return leaf
        if len(inside) == MAX_DEPTH:
            return self._leave_out(value, label, f"nested deeper than {MAX_DEPTH}")
        if id(value) in inside:
            return self._leave_out(value, label, "contains itself")
        try:
            return self._write_container(value, label, (*inside, id(value)))
        except Exception as error:
            # A container of the user's own may do anything when asked for its items.
            return self._leave_out(value, label, f"raised {type(error).__name__} when it was read")

    def _write_container(self, value: Any, label: str, inside: tuple[int, ...]) -> Json:
        if isinstance(value, slice):
            parts = (("start", value.start), ("stop", value.stop), ("step", value.step))
            return {"slice": [self._write(part, f"{label}[{name}]", inside) for name, part in parts]}
        names = _field_names(type(value))
        if names is not None:
            kind = "named tuple" if isinstance(value, tuple) else "dataclass"
            held = [[name, self._write(getattr(value, name), f"{label}[{name}]", inside)] for name in names]
            owner, name = type(value).__module__, type(value).__qualname__
            return {"structure": {"kind": kind, "module": owner, "class": name, "fields": held}}
        if isinstance(value, tuple | list):
            word = "tuple" if isinstance(value, tuple) else "list"
            return {word: [self._write(item, f"{label}[{i}]", inside) for i, item in enumerate(value)]}
        if isinstance(value, Mapping):
            if any(not _is_key(key) for key in value):
                return self._leave_out(value, label, "it has keys that are no plain values")
            items = [(key, spell_key(key), value[key]) for key in value]
            return {
                "dict": [
                    [self._write(key, label, inside), self._write(item, f"{label}[{spelt}]", inside)]
                    for key, spelt, item in items
                ]
            }
        return self._leave_out(value, label, "a capsule holds tensors, plain values and containers of them")

    def _leave_out(self, value: Any, label: str, why: str) -> Json:
        return {"left out": self._take_note(LeftOut(label, type_name(value), None, why))}


_NO_LEAF = object()


def _leaf(value: Any) -> Json:
    """Return the tree of a value without parts. An instance of a subclass, such as an enum, is kept as its base."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        number = int.__index__(value)
        return number if number.bit_length() <= _MAX_BITS else _NO_LEAF
    if isinstance(value, float):
        real = float.__float__(value)
        return real if isfinite(real) else {"float": str(real)}
    if isinstance(value, str):
        return str.__str__(value) if len(value) <= _MAX_CHARACTERS else _NO_LEAF
    if value is ...:
        return {"ellipsis": True}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, torch.Size) and all(type(size) is int for size in value):
        return {"size": list(value)}
    return _NO_LEAF


def _is_key(key: Any) -> bool:
    return all(map(_is_key, key)) if type(key) is tuple else _leaf(key) is not _NO_LEAF


def read(tree: Json, where: str, lookup: Callable[[str], Any], depth: int = 0) -> Any:
    """Return the value of a tree that `Writer` wrote; `lookup` returns what a name stands for, or raises KeyError.

    Lists, tuples and dicts come back as such, a dataclass or named tuple as a Structure, what was left out as
    LeftOut. Raises ValueError, naming the place, for anything else.
    """
    if depth > 2 * MAX_DEPTH:
        raise ValueError(f"{where} is nested deeper than {2 * MAX_DEPTH}")
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if not isinstance(tree, dict) or len(tree) != 1:
        raise fail(where, "a plain value or an object with one key", tree)
    ((word, body),) = tree.items()
    reader = _READERS.get(word)
    if reader is None:
        raise ValueError(f"{where} has {shorten(word)}, which is none of {', '.join(_READERS)}")
    return reader(body, f"{where}.{word}", lookup, depth + 1)


_Lookup: TypeAlias = Callable[[str], Any]


def _read_items(body: Json, where: str, lookup: _Lookup, depth: int) -> list[Any]:
    return reading.list_of(lambda item, place: read(item, place, lookup, depth))(body, where)


def _read_pairs(body: Json, where: str, lookup: _Lookup, depth: int) -> dict[Any, Any]:
    if not isinstance(body, list):
        raise fail(where, "a list of pairs", body)
    found: dict[Any, Any] = {}
    for i, pair in enumerate(body):
        if not isinstance(pair, list) or len(pair) != 2:
            raise fail(f"{where}[{i}]", "a pair", pair)
        key, value = _read_items(pair, f"{where}[{i}]", lookup, depth)
        if not _is_key(key):
            raise fail(f"{where}[{i}][0]", "a key, so a plain value", pair[0])
        found[key] = value
    if len(found) != len(body):
        raise ValueError(f"{where} has one key twice")
    return found


def _read_structure(body: Json, where: str, lookup: _Lookup, depth: int) -> Structure:
    found = _STRUCTURE(body, where)
    fields = _read_pairs(found.fields, f"{where}.fields", lookup, depth)
    if not all(isinstance(name, str) for name in fields):
        raise fail(f"{where}.fields", "pairs of a name and a value", found.fields)
    return Structure(found.kind, found.module, found.class_, fields)


class _Structure(NamedTuple):
    kind: Kind
    module: str
    class_: str
    fields: Any


_STRUCTURE = reading.of(_Structure)


def _read_name(body: Json, where: str, lookup: _Lookup, depth: int) -> Any:
    if not isinstance(body, str):
        raise fail(where, "a name", body)
    try:
        return lookup(body)
    except KeyError:
        raise ValueError(f"{where} names {shorten(body)}, which the capsule does not have") from None


def _read_float(body: Json, where: str, lookup: _Lookup, depth: int) -> float:
    if body not in _FLOATS:
        raise fail(where, '"nan", "inf" or "-inf"', body)
    return float(body)


def _read_slice(body: Json, where: str, lookup: _Lookup, depth: int) -> slice:
    parts = _read_items(body, where, lookup, depth)
    if len(parts) != 3:
        raise fail(where, "a list of start, stop and step", body)
    return slice(*parts)


def _read_ellipsis(body: Json, where: str, lookup: _Lookup, depth: int) -> Any:
    if body is not True:
        raise fail(where, "true", body)
    return ...


_READERS: dict[str, Callable[[Json, str, _Lookup, int], Any]] = {
    "float": _read_float,
    "tensor": _read_name,
    "tuple": lambda *given: tuple(_read_items(*given)),
    "list": _read_items,
    "dict": _read_pairs,
    "structure": _read_structure,
    "dtype": lambda body, where, lookup, depth: dtype(body, where),
    "device": lambda body, where, lookup, depth: device(body, where),
    "size": lambda body, where, lookup, depth: torch.Size(sizes(body, where)),
    "slice": _read_slice,
    "ellipsis": _read_ellipsis,
    "left out": _read_name,
}


def dtype(value: Json, where: str) -> torch.dtype:
    """Return the torch.dtype of this name. Raise ValueError when there is none."""
    if not isinstance(value, str) or value not in DTYPES:
        raise fail(where, "the name of a torch.dtype, such as float16", value)
    return DTYPES[value]


def device(value: Json, where: str) -> torch.device:
    """Return the torch.device of this name. Raise ValueError when torch knows none."""
    if isinstance(value, str) and _DEVICE.fullmatch(value):
        try:
            return torch.device(value)
        except RuntimeError:
            pass
    raise fail(where, "the name of a device, such as cuda:0", value)


def sizes(value: Json, where: str) -> tuple[int, ...]:
    """Return a shape or strides. Raise ValueError unless it is a list of numbers that fit in 63 bits."""
    if not isinstance(value, list) or len(value) > 64:
        raise fail(where, "a list of at most 64 sizes", value)
    for size in value:
        if type(size) is not int or not 0 <= size < 2**63:
            raise fail(where, "a list of whole numbers from 0", value)
    return tuple(value)
