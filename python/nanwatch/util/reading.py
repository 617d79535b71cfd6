"""Readers of JSON documents, which may come from anybody, and `plain` for writing them.

A reader takes a value and its place in the document, follows an annotation, and raises ValueError with that place.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import cache
from math import inf, isfinite, nan
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from .visible import visible

_T = TypeVar("_T")
_PLAIN = {str: "a string", int: "an integer", bool: "true or false"}
_SPECIAL = {"nan": nan, "inf": inf, "-inf": -inf}


def document(text: str, read_all: Callable[[Any], _T], what: str) -> _T:
    """Parse a JSON text and return what `read_all` makes of it. Raise ValueError with the reason."""
    try:
        return read_all(json.loads(text))
    except RecursionError:
        raise ValueError(f"not {what}: nested too deeply") from None
    except (ValueError, TypeError) as error:
        raise ValueError(visible(f"not {what}: {error}; pass the whole text that to_json() wrote")) from error


def body(document: Any, schema: str, version: int) -> dict[str, Any]:
    """Return the members of a document but for its schema and version. Raise ValueError for others than these."""
    if not isinstance(document, dict) or document.get("schema") != schema:
        raise ValueError(f"no document of the schema {schema!r}")
    members = {name: value for name, value in document.items() if name != "schema"}
    if (came := members.pop("version", None)) != version:
        raise ValueError(f"its version is {shorten(came)}, this nanwatch reads version {version}")
    return members


def plain(value: Any) -> Any:
    """Return `value` for JSON: dataclasses and named tuples as dicts, tuples as lists, nan and inf as strings.

    A field of a NamedTuple that is None, and None by default, is left out.
    """
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if hasattr(value, "_fields"):
        defaults = value._field_defaults
        kept = {name: getattr(value, name) for name in value._fields}
        kept = {n: item for n, item in kept.items() if item is not None or defaults.get(n, "") is not None}
    elif hasattr(value, "__dataclass_fields__"):
        kept = {name: getattr(value, name) for name in value.__dataclass_fields__}
    else:
        return [plain(item) for item in value] if isinstance(value, tuple | list) else value
    return {name.removesuffix("_"): plain(item) for name, item in kept.items()}


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
        if value not in arguments:
            raise _fault(where, f"one of {', '.join(map(repr, arguments))}", value)
        return value
    if origin in (tuple, list):
        return _items(origin, arguments, value, where)
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise _fault(where, "an object", value)
        return {key: read(arguments[1], item, f"{where}[{shorten(key)}]") for key, item in value.items()}
    if kind is float:
        return _number(value, where)
    if kind in _PLAIN:
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise _fault(where, _PLAIN[kind], value)
        return value
    return _object(kind, value, where)


def _items(origin: Any, arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    size = None if origin is list or arguments[-1] is Ellipsis else len(arguments)
    if not isinstance(value, list) or size not in (None, len(value)):
        raise _fault(where, "a list" if size is None else f"a list of {size}", value)
    kinds = [arguments[0]] * len(value) if size is None else arguments
    return origin(read(kinds[i], item, f"{where}[{i}]") for i, item in enumerate(value))


def _number(value: Any, where: str) -> float:
    if isinstance(value, str) and value in _SPECIAL:
        return _SPECIAL[value]
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max:
        return float(value)
    raise _fault(where, 'a number, "nan", "inf" or "-inf"', value)


def _object(kind: Any, value: Any, where: str) -> Any:
    """Read a dataclass or NamedTuple. A field with a default may be missing."""
    hints, optional = _fields(kind)
    if not isinstance(value, dict):
        raise _fault(where, "an object", value)
    # A name that Python reserves has an underscore behind it: `class_` is "class".
    names = {name.removesuffix("_"): name for name in hints}
    if missing := [name for name in names if name not in value and names[name] not in optional]:
        raise ValueError(f"{where} has no {missing[0]!r}")
    if unknown := [name for name in value if name not in names]:
        raise ValueError(f"{where} has {shorten(unknown[0])}, which this version does not know")
    return kind(
        **{names[name]: read(hints[names[name]], item, f"{where}.{name}") for name, item in value.items()}
    )


@cache
def _fields(kind: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the types of the fields, and those that have a default."""
    hints = get_type_hints(kind, include_extras=True)
    if hasattr(kind, "_field_defaults"):
        return hints, list(kind._field_defaults)
    optional = [
        field.name for field in fields(kind) if (field.default, field.default_factory) != (MISSING, MISSING)
    ]
    return {field.name: hints[field.name] for field in fields(kind)}, optional


def shorten(value: object) -> str:
    """Return `repr(value)`, cut to 60 characters."""
    shown = f"{type(value).__name__} of {len(value)}" if isinstance(value, list | dict) else repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def _fault(where: str, expected: str, value: object) -> ValueError:
    return ValueError(f"{where} should be {expected}, got {shorten(value)}")
