"""Readers of JSON documents, which may come from anybody, and `plain` for writing them.

A reader takes a value and the place of it in the document, so that an error names the place. It raises ValueError.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import cache, partial
from math import inf, isfinite, nan
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

from .visible import visible

# In bytes. A report of 21 frames has 18 kB, one of a whole batch 0.7 MB; Python's objects for it take ten times that.
MAX_FILE = 1 << 28

_T = TypeVar("_T")
Reader: TypeAlias = Callable[[Any, str], _T]


def refuse_constant(name: str) -> float:
    """Raise ValueError for NaN and Infinity, which are no JSON: for json.loads(parse_constant=…)."""
    raise ValueError(f'{name} is no JSON number; "{name}" in quotes was expected')


def check_regular(path: Path, *, follows_links: bool = True) -> None:
    """Raise ValueError unless `path` is a regular file: a pipe would never answer, and /dev/zero never end."""
    status = path.stat() if follows_links else path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise ValueError("is no regular file" + ("" if follows_links else " (links are not followed)"))


def file_text(path: Path, most: int = MAX_FILE, *, follows_links: bool = True) -> str:
    """Return the UTF-8 text of a regular file of at most `most` bytes. Raises OSError or ValueError."""
    check_regular(path, follows_links=follows_links)
    # Opening must not wait either, should a pipe have come to this place since.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"has more than {most:,} bytes, which is the most that is read")
    return content.decode("utf-8")


def document(text: str, read: Callable[[Any], _T], what: str, advice: str) -> _T:
    """Parse a JSON text and return what `read` makes of it. Raise ValueError with the reason and the advice."""
    try:
        return read(json.loads(text, parse_constant=refuse_constant))
    except RecursionError:
        raise ValueError(f"not {what}: nested too deeply; {advice}") from None
    except (ValueError, TypeError) as error:
        raise ValueError(visible(f"not {what}: {error}; {advice}")) from error


def body(document: Any, schema: str, version: int, where: str = "report") -> dict[str, Any]:
    """Return the members of a document but for its schema and version. Raise ValueError for others than these."""
    if isinstance(document, dict) and document.get("schema") == schema and document.get("version") != version:
        came = shorten(document.get("version"))
        raise ValueError(f"its version is {came}, this nanwatch reads version {version}")
    head = {"schema": one_of((schema,)), "version": one_of((version,))}
    rest = dict(document) if isinstance(document, dict) else {}
    members({name: rest.pop(name) for name in head if name in rest} if rest else document, where, head)
    return rest


def plain(value: Any) -> Any:
    """Return `value` for JSON: dataclasses and named tuples as dicts, tuples as lists, nan and inf as strings."""
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, tuple | list) and not hasattr(value, "_fields"):
        return [plain(item) for item in value]
    names = _field_names(type(value))
    absent = [name for name in left_out(type(value)) if getattr(value, name) is None]
    if names:
        return {name.removesuffix("_"): plain(getattr(value, name)) for name in names if name not in absent}
    return {key: plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def left_out(kind: Any) -> tuple[str, ...]:
    """Return the fields of a NamedTuple that a document has only where they are not None: those with this default."""
    return tuple(name for name, default in getattr(kind, "_field_defaults", {}).items() if default is None)


def _field_names(kind: type) -> tuple[str, ...]:
    if hasattr(kind, "__dataclass_fields__"):
        return tuple(field.name for field in fields(kind))
    return tuple(getattr(kind, "_fields", ()))


# Readers.


def read(kind: Any, value: Any, where: str) -> Any:
    """Return what a document has in place of a value of this type: a dataclass, a NamedTuple, or what they hold."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        return read(arguments[0], value, where)
    if type(None) in arguments:
        return None if value is None else read(arguments[0], value, where)
    if origin is Literal:
        return one_of(arguments)(value, where)
    if origin in (tuple, list):
        return _items(origin, arguments, value, where)
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise fail(where, "an object", value)
        return {key: read(arguments[1], item, f"{where}[{shorten(key)}]") for key, item in value.items()}
    if kind in _PLAIN:
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise fail(where, _PLAIN[kind], value)
        return value
    return number(value, where) if kind is float else _object(kind, value, where)


_PLAIN = {str: "a string", int: "an integer", bool: "true or false"}


def _items(origin: Any, arguments: Sequence[Any], value: Any, where: str) -> Any:
    size = None if origin is list or arguments[-1] is Ellipsis else len(arguments)
    if not isinstance(value, list) or size not in (None, len(value)):
        raise fail(where, "a list" if size is None else f"a list of {size}", value)
    kinds = [arguments[0]] * len(value) if size is None else arguments
    return origin(
        read(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, value, strict=True))
    )


def _object(kind: Any, value: Any, where: str) -> Any:
    """Read a dataclass or NamedTuple. A field with a default may be missing."""
    hints, optional = _fields(kind)
    given = _own.get(kind, {})
    readers = {name.removesuffix("_"): given.get(name, partial(read, hint)) for name, hint in hints.items()}
    document = members(value, where, readers, {name.removesuffix("_"): _ABSENT for name in optional})
    items = {name: document[name.removesuffix("_")] for name in hints}
    return kind(**{name: item for name, item in items.items() if item is not _ABSENT})


@cache
def _fields(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the types of the fields, and those that have a default.

    A name that Python reserves has an underscore behind it: `class_` is "class".
    """
    hints = get_type_hints(kind, include_extras=True)
    if not hasattr(kind, "__dataclass_fields__"):
        return hints, list(kind._field_defaults)
    optional = [
        field.name for field in fields(kind) if (field.default, field.default_factory) != (MISSING, MISSING)
    ]
    return {field.name: hints[field.name] for field in fields(kind)}, optional


_ABSENT = object()
_own: dict[Any, dict[str, Reader[Any]]] = {}


def of(kind: Callable[..., _T], **own: Reader[Any]) -> Reader[_T]:
    """Return a reader of a dataclass or NamedTuple, in which `own` reads the fields named there, here and elsewhere."""
    if own:
        _own[kind] = own
    return partial(read, kind)


def text(value: Any, where: str) -> str:
    """Read a string."""
    string: str = read(str, value, where)
    return string


def count(value: Any, where: str) -> int:
    """Read a whole number."""
    integer: int = read(int, value, where)
    return integer


def number(value: Any, where: str) -> float:
    """Read a number; nan and the infinities are spelt as strings."""
    special = {"nan": nan, "inf": inf, "-inf": -inf}
    if isinstance(value, str) and value in special:
        return special[value]
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    raise fail(where, 'a number, "nan", "inf" or "-inf"', value)


def one_of(choices: tuple[_T, ...]) -> Reader[_T]:
    """Return a reader of one of the choices."""

    def read_one(value: Any, where: str) -> _T:
        if value not in choices:
            raise fail(where, f"one of {', '.join(map(repr, choices))}", value)
        return choices[choices.index(value)]

    return read_one


def members(
    value: Any, where: str, readers: Mapping[str, Reader[Any]], added: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read an object that has exactly these members, each by its reader.

    `added` has the values of members that may be missing.
    """
    if not isinstance(value, dict):
        raise fail(where, "an object", value)
    absent = added or {}
    for name in readers:
        if name not in value and name not in absent:
            raise ValueError(f"{where} has no {name!r}")
    for name in value:
        if name not in readers:
            raise ValueError(f"{where} has {shorten(name)}, which this version does not know")
    present = {
        name: reader(value[name], f"{where}.{name}") for name, reader in readers.items() if name in value
    }
    return {**absent, **present}


def shorten(value: object) -> str:
    """Return `repr(value)`, cut to 60 characters."""
    # Only the beginning is made: a hostile value may be a gigabyte.
    if isinstance(value, str):
        return repr(value) if len(value) <= 58 else f"{value[:54]!r}..."
    if isinstance(value, list | dict):
        return f"{type(value).__name__} of {len(value)}"
    shown = repr(value) if not isinstance(value, int) or value.bit_length() < 200 else "a huge number"
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def fail(where: str, expected: str, value: object) -> ValueError:
    """Return a ValueError that names the place, what is accepted there and what came."""
    return ValueError(f"{where} should be {expected}, got {shorten(value)}")
