"""Readers of JSON documents, which may come from anybody, and `plain` for writing them.

A reader takes a value and its place in the document, follows an annotation, and raises ValueError with that place.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import cache
from inspect import signature
from math import isfinite
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from .visible import visible

_T = TypeVar("_T")
_PLAIN = {str: "a string", int: "an integer", bool: "true or false"}


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
    names = getattr(value, "_fields", None) or getattr(value, "__dataclass_fields__", ())
    if not names:
        return [plain(item) for item in value] if isinstance(value, tuple | list) else value
    defaults = getattr(value, "_field_defaults", {})
    left_out = [name for name in names if getattr(value, name) is defaults.get(name, value) is None]
    return {name.removesuffix("_"): plain(getattr(value, name)) for name in names if name not in left_out}


def read(kind: Any, value: Any, where: str) -> Any:
    """Return what a document has in place of a value of this type: a dataclass, a NamedTuple, or what they hold."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if type(None) in arguments and value is None:
        return None
    if origin is Annotated or type(None) in arguments:
        return read(arguments[0], value, where)
    if origin is Literal:
        _check(value in arguments, where, f"one of {', '.join(map(repr, arguments))}", value)
        return value
    if origin in (tuple, list):
        size = None if origin is list or arguments[-1] is Ellipsis else len(arguments)
        is_right = isinstance(value, list) and size in (None, len(value))
        _check(is_right, where, "a list" if size is None else f"a list of {size}", value)
        kinds = arguments if size else arguments[:1] * len(value)
        return origin(read(kinds[i], item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin in (dict, Mapping):
        _check(isinstance(value, dict), where, "an object", value)
        return {key: read(arguments[1], item, f"{where}[{shorten(key)}]") for key, item in value.items()}
    if kind is float:
        # An int beyond a float's range, or a nan that is no string, comes from no writer of ours.
        is_number = type(value) in (int, float) and abs(value) <= sys.float_info.max
        _check(is_number or value in ("nan", "inf", "-inf"), where, 'a number, "nan", "inf" or "-inf"', value)
        return float(value)
    if kind in _PLAIN:
        _check(type(value) is kind, where, _PLAIN[kind], value)
        return value
    return _object(kind, value, where)


def _check(is_right: bool, where: str, expected: str, value: object) -> None:
    if not is_right:
        raise ValueError(f"{where} should be {expected}, got {shorten(value)}")


def _object(kind: Any, value: Any, where: str) -> Any:
    """Read a dataclass or NamedTuple. A field with a default may be missing."""
    _check(isinstance(value, dict), where, "an object", value)
    hints, optional = _fields(kind)
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
    hints, parameters = get_type_hints(kind, include_extras=True), signature(kind).parameters.values()
    optional = [parameter.name for parameter in parameters if parameter.default is not parameter.empty]
    return {parameter.name: hints[parameter.name] for parameter in parameters}, optional


def shorten(value: object) -> str:
    """Return `repr(value)`, cut to 60 characters."""
    shown = f"{type(value).__name__} of {len(value)}" if isinstance(value, list | dict) else repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
