"""Write docs/schemas/*.json, the JSON schemas of the documents that programs read.

    python docs/make_schemas.py

They follow from the annotations that the readers follow (nanwatch/records/fields.py). A test fails where a file is not
what this script writes, and where a document and its schema part.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import MISSING
from inspect import get_annotations
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from nanwatch.blackbox import reader
from nanwatch.report import events, report
from nanwatch.report.finding_text import Explanation
from nanwatch.scan import scan as scans
from nanwatch.trace import comparison

PLACE = Path(__file__).with_name("schemas")
# Each document: its class, its name and version, and the members that are no fields: those it may have, and must have.
DOCUMENTS: dict[str, tuple[type, str, int, dict[str, Any], dict[str, Any]]] = {
    "report": (report.Report, report.SCHEMA, report.VERSION, {"explanation": Explanation}, {}),
    "spike": (events.SpikeReport, events.SPIKE_SCHEMA, events.SPIKE_VERSION, {}, {}),
    "blackbox": (reader.BlackBoxReport, reader.SCHEMA, reader.VERSION, {}, {}),
    "comparison": (comparison.Comparison, comparison.SCHEMA, comparison.VERSION, {}, {}),
    "scan": (scans.Scan, scans.SCHEMA, scans.VERSION, {"is_faithful": bool}, {"is_sound": bool}),
}
_PLAIN = {str: "string", int: "integer", bool: "boolean", type(None): "null"}
_NUMBER = {
    "description": "nan and the infinities are strings",
    "anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}],
}


def schema(name: str) -> str:
    """Return the text of the schema of a document."""
    kind, words, version, may, must = DOCUMENTS[name]
    definitions: dict[str, Any] = {"number": _NUMBER}
    found = _members(kind, definitions)
    head = {"schema": {"const": words}, "version": {"const": version}}
    more = {key: _value(one, definitions) for key, one in {**may, **must}.items()}
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:{words.replace('.', ':')}:{version}",
        "title": words,
        **found,
        "properties": {**head, **found["properties"], **more},
        "required": [*head, *found["required"], *must],
        "$defs": definitions,
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _members(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a dataclass or NamedTuple. A member with a default may be missing.

    A field that is left out of comparisons is left out of documents.
    """
    hints: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        space = vars(sys.modules[base.__module__])
        for name, words in get_annotations(base).items():
            hints[name] = eval(str(getattr(words, "__forward_arg__", words)), space)
    fields = getattr(kind, "__dataclass_fields__", None)
    names = kind._fields if fields is None else [name for name in fields if fields[name].compare]
    optional = (
        {*kind._field_defaults}
        if fields is None
        else {
            name for name, one in fields.items() if (one.default, one.default_factory) != (MISSING, MISSING)
        }
    )
    return {
        "description": " ".join((kind.__doc__ or "").split("\n\n")[0].split()),
        "type": "object",
        "properties": {name.removesuffix("_"): _value(hints[name], definitions) for name in names},
        "required": [name.removesuffix("_") for name in names if name not in optional],
        "additionalProperties": False,
    }


def _value(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a value with this annotation."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind in _PLAIN:
        return {"type": _PLAIN[kind]}
    if kind is float:
        return {"$ref": "#/$defs/number"}
    if kind is Any:
        return {}
    if origin is Annotated:
        return _value(arguments[0], definitions)
    if origin is Literal:
        return {"enum": list(arguments)}
    if origin in (Union, UnionType):
        return {"anyOf": [_value(one, definitions) for one in arguments]}
    if origin is tuple and arguments[-1] is not Ellipsis:
        items = [_value(one, definitions) for one in arguments]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "maxItems": len(items)}
    if origin in (tuple, list):
        return {"type": "array", "items": _value(arguments[0], definitions)}
    if origin in (dict, Mapping):
        return {"type": "object", "additionalProperties": _value(arguments[1], definitions)}
    if kind.__name__ not in definitions:
        definitions[kind.__name__] = {}  # a class that holds itself
        definitions[kind.__name__] = _members(kind, definitions)
    return {"$ref": f"#/$defs/{kind.__name__}"}


if __name__ == "__main__":
    PLACE.mkdir(exist_ok=True)
    for name in DOCUMENTS:
        (PLACE / f"{name}.json").write_text(schema(name), encoding="utf-8")
