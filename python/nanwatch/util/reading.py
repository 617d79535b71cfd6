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
from math import inf, isfinite, nan
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, get_args, get_origin

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
        found = shorten(document.get("version"))
        raise ValueError(f"its version is {found}, this nanwatch reads version {version}")
    head = {"schema": one_of((schema,)), "version": one_of((version,))}
    rest = dict(document) if isinstance(document, dict) else {}
    own = {name: rest.pop(name) for name in head if name in rest} if rest else document
    members(own, where, head)
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


def text(value: Any, where: str) -> str:
    """Read a string."""
    if not isinstance(value, str):
        raise fail(where, "a string", value)
    return value


def count(value: Any, where: str) -> int:
    """Read a whole number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise fail(where, "an integer", value)
    return value


def flag(value: Any, where: str) -> bool:
    """Read true or false."""
    if not isinstance(value, bool):
        raise fail(where, "true or false", value)
    return value


def number(value: Any, where: str) -> float:
    """Read a number; nan and the infinities are spelt as strings."""
    special = {"nan": nan, "inf": inf, "-inf": -inf}
    if isinstance(value, str) and value in special:
        return special[value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:  # an integer of more than 308 digits
            number = inf
        if isfinite(number):
            return number
    raise fail(where, 'a number, "nan", "inf" or "-inf"', value)


def one_of(choices: tuple[_T, ...]) -> Reader[_T]:
    """Return a reader of one of the choices."""

    def read(value: Any, where: str) -> _T:
        if value not in choices:
            raise fail(where, f"one of {', '.join(map(repr, choices))}", value)
        return choices[choices.index(value)]

    return read


def optional(read: Reader[_T]) -> Reader[_T | None]:
    """Return a reader of null, or of what `read` reads."""
    return lambda value, where: None if value is None else read(value, where)


def list_of(read: Reader[_T]) -> Reader[list[_T]]:
    """Return a reader of a list, each item by `read`."""

    def read_all(value: Any, where: str) -> list[_T]:
        if not isinstance(value, list):
            raise fail(where, "a list", value)
        return [read(item, f"{where}[{i}]") for i, item in enumerate(value)]

    return read_all


def tuple_of(read: Reader[_T]) -> Reader[tuple[_T, ...]]:
    """Return a reader of a list as a tuple, each item by `read`."""
    return lambda value, where: tuple(list_of(read)(value, where))


def _row_of(readers: Sequence[Reader[Any]]) -> Reader[tuple[Any, ...]]:
    """Return a reader of a list with one item for each reader, as a tuple."""

    def read_each(value: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list) or len(value) != len(readers):
            raise fail(where, f"a list of {len(readers)}", value)
        return tuple(
            read(item, f"{where}[{i}]") for i, (read, item) in enumerate(zip(readers, value, strict=True))
        )

    return read_each


def mapping_of(read: Reader[_T]) -> Reader[dict[str, _T]]:
    """Return a reader of an object with any members, each by `read`."""

    def read_all(value: Any, where: str) -> dict[str, _T]:
        if not isinstance(value, dict):
            raise fail(where, "an object", value)
        return {key: read(item, f"{where}[{shorten(key)}]") for key, item in value.items()}

    return read_all


def members(
    value: Any, where: str, readers: Mapping[str, Reader[Any]], added: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Read an object that has exactly these members, each by its reader.

    `added` has the values of members that documents of earlier versions lack.
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
    found = {name: read(value[name], f"{where}.{name}") for name, read in readers.items() if name in value}
    return {**absent, **found}


def of(kind: Callable[..., _T], **own: Reader[Any]) -> Reader[_T]:
    """Return a reader of a dataclass or NamedTuple: `own` reads the fields named there, annotations say the others.

    A field with a default may be missing. A name that Python reserves has an underscore behind it: `class_` is "class".
    Annotations of this class elsewhere mean this reader from now on.
    """
    space = vars(sys.modules[kind.__module__])
    names = {name: name.removesuffix("_") for name in kind.__annotations__}
    readers = {
        # A NamedTuple wraps its annotations in ForwardRef.
        names[name]: own.get(name)
        or _of_annotation(eval(str(getattr(words, "__forward_arg__", words)), space))
        for name, words in kind.__annotations__.items()
    }
    optional = {names[name]: _ABSENT for name in names if _has_default(kind, name)}

    def read(value: Any, where: str) -> _T:
        found = members(value, where, readers, optional)
        return kind(**{name: one for name in names if (one := found[names[name]]) is not _ABSENT})

    _readers[kind] = read
    return read


_ABSENT = object()


def _has_default(kind: Any, name: str) -> bool:
    if field := getattr(kind, "__dataclass_fields__", {}).get(name):
        return field.default is not MISSING or field.default_factory is not MISSING
    return name in kind._field_defaults


def _of_annotation(kind: Any) -> Reader[Any]:
    if kind in _readers:
        return _readers[kind]
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _of_annotation(arguments[0])
    if origin is Literal:
        return one_of(arguments)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return _row_of([_of_annotation(one) for one in arguments])
    if origin in _READERS_OF:
        return _READERS_OF[origin](
            _of_annotation(next(one for one in reversed(arguments) if one is not Ellipsis))
        )
    return optional(_of_annotation(arguments[0])) if type(None) in arguments else of(kind)


_readers: dict[Any, Reader[Any]] = {
    str: text,
    int: count,
    bool: flag,
    float: number,
    Any: lambda value, where: value,
}
_READERS_OF: dict[Any, Callable[[Reader[Any]], Reader[Any]]] = {
    tuple: tuple_of,
    list: list_of,
    dict: mapping_of,
    Mapping: mapping_of,
}


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
