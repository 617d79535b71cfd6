"""JSON of dataclasses and named tuples by their annotations: `plain` writes it, `read` reads what may be anybody's."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from inspect import signature
from math import isfinite
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from ..util.messages import shorten

_PLAIN = {str: "a string", int: "an integer", bool: "true or false"}


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
    """Return what a document has in place of a value of this type: a dataclass, a NamedTuple, or what they hold.

    Raises ValueError with the place in the document, `where`, for anything else.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any or (value is None and type(None) in arguments):
        return value
    if origin is Annotated or type(None) in arguments:
        return read(arguments[0], value, where)
    if origin is Literal or kind in _PLAIN:
        expected = f"one of {', '.join(map(repr, arguments))}" if arguments else _PLAIN[kind]
        _check(value in arguments if arguments else type(value) is kind, where, expected, value)
        return value
    if origin in (tuple, list):
        size = None if origin is list or arguments[-1] is Ellipsis else len(arguments)
        is_right = isinstance(value, list) and size in (None, len(value))
        _check(is_right, where, "a list" if size is None else f"a list of {size}", value)
        kinds = arguments if size else arguments[:1] * len(value)
        return origin(read(kinds[i], item, f"{where}[{i}]") for i, item in enumerate(value))
    if kind is float:
        # An int beyond a float's range, or a nan that is no string, comes from no writer of ours.
        is_number = type(value) in (int, float) and abs(value) <= sys.float_info.max
        _check(is_number or value in ("nan", "inf", "-inf"), where, 'a number, "nan", "inf" or "-inf"', value)
        return float(value)
    _check(isinstance(value, dict), where, "an object", value)
    if origin in (dict, Mapping):
        return {key: read(arguments[1], item, f"{where}[{shorten(key)}]") for key, item in value.items()}
    fields, values = _fields(kind), {}
    if missing := [name for name, field in fields.items() if name not in value and not field[2]]:
        raise ValueError(f"{where} has no {missing[0]!r}")
    for name, item in value.items():
        if name not in fields:
            raise ValueError(f"{where} has {shorten(name)}, which this version does not know")
        values[fields[name][0]] = read(fields[name][1], item, f"{where}.{name}")
    return kind(**values)


def _check(is_right: bool, where: str, expected: str, value: object) -> None:
    if not is_right:
        raise ValueError(f"{where} should be {expected}, got {shorten(value)}")


@cache
def _fields(kind: Any) -> dict[str, tuple[str, Any, bool]]:
    """Return the fields by their names in a document: each name here, its type, and whether it may be missing."""
    hints, parameters = get_type_hints(kind, include_extras=True), signature(kind).parameters.values()
    # A name that Python reserves has an underscore behind it: `class_` is "class".
    return {x.name.removesuffix("_"): (x.name, hints[x.name], x.default is not x.empty) for x in parameters}
