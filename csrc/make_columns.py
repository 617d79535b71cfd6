"""Write csrc/numerics/columns.h, names for the items of rows, from the declarations in python/nanwatch/.

    python csrc/make_columns.py             write it
    python csrc/make_columns.py --check     fail where it is not what this script writes

The stub python/nanwatch/_C.pyi gets a digest of the generated headers. A build keeps the digest of the stub, so that
loading it shows whether it is older than the declarations (numerics/_extension.py).

Needs neither PyTorch nor nanwatch: the declarations are parsed, not imported.
"""

from __future__ import annotations

import ast
import re
import sys
from hashlib import sha256
from pathlib import Path

CSRC = Path(__file__).resolve().parent
SOURCE = CSRC.parent / "python" / "nanwatch"
PLACE = CSRC / "numerics" / "columns.h"
FORMATS = CSRC / "numerics" / "format_table.h"
STUB = SOURCE / "_C.pyi"
HEAD = """\
// Names for the items of rows, of those of the kernels and those that Python has. Host and device, no torch. Written by
// csrc/make_columns.py from python/nanwatch/; `make lint` checks that it is not stale.
// clang-format off
#pragma once

#include <cstdint>

namespace nanwatch {
"""


def parsed(path: str) -> list[ast.stmt]:
    """Return the statements of a module."""
    return ast.parse((SOURCE / path).read_text(encoding="utf-8")).body


def fields_of(path: str, name: str) -> list[str]:
    """Return the fields of a named tuple, in order."""
    (declared,) = (one for one in parsed(path) if isinstance(one, ast.ClassDef) and one.name == name)
    return [one.target.id for one in declared.body if isinstance(one, ast.AnnAssign)]  # type: ignore[union-attr]


def assigned(path: str, name: str) -> ast.expr:
    """Return what a module assigns to an annotated name."""
    (value,) = (
        one.value
        for one in parsed(path)
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and one.target.id == name
    )
    assert value is not None
    return value


def choices_of(path: str, name: str) -> list[str]:
    """Return the texts of a Literal."""
    literal = assigned(path, name)
    assert isinstance(literal, ast.Subscript)
    return list(ast.literal_eval(literal.slice))


def scope(name: str, enumerators: list[str], remark: str) -> str:
    """Return a namespace with an enumeration that converts to int."""
    items = ", ".join(enumerators)
    return f"\n// {remark}\nnamespace {name} {{\nenum Item : int {{ {items} }};\n}}  // namespace {name}\n"


def enumeration(name: str, texts: list[str]) -> str:
    """Return an enumeration and the texts of its enumerators in Python; "" is `none`."""
    spelt = ", ".join(f'"{text}"' for text in texts)
    return (
        f"\nenum class {name} : uint8_t {{ {', '.join(text or 'none' for text in texts)} }};\n"
        f"inline constexpr const char* k{name}s[] = {{{spelt}}};\n"
    )


def header() -> str:
    """Return the text of the header."""
    record, note, formats = "records/record.py", "records/note.py", "numerics/formats.py"
    health = [name for name in fields_of(formats, "TensorHealth") if name != "numel"]
    items = fields_of(record, "Record")
    return (
        HEAD
        + scope(
            "column",
            [*health, "is_mask"],
            "A row of the health operator. A range is its first kRangeColumns; a row from a device has all of them.",
        )
        + "\nconstexpr int kRangeColumns = column::isfinite + 1;\n"
        + f"constexpr int kHealthColumns = column::{health[-1]} + 1;\n"
        + "constexpr int kDeviceColumns = column::is_mask + 1;\n"
        + scope("record_item", items, "A record as a Python tuple.")
        + f"\nconstexpr int kRecordItems = record_item::{items[-1]} + 1;\n"
        + enumeration("Role", choices_of(record, "Role"))
        + enumeration("Phase", choices_of(record, "Phase"))
        + scope("note_item", fields_of(note, "Note"), "A note as a Python tuple.")
        + f"\nconstexpr int kNoteItems = note_item::{fields_of(note, 'Note')[-1]} + 1;\n"
        + enumeration("NoteKind", ["", *choices_of(note, "NoteKind")])
        + "// These say that a non-finite value is meant.\n"
        + "inline constexpr NoteKind kExcuses[] = {"
        + ", ".join(f"NoteKind::{kind}" for kind in ast.literal_eval(assigned(note, "EXCUSES")))
        + "};\n"
        + "\n}  // namespace nanwatch\n"
    )


def stub() -> str:
    """Return the text of the stub with the digest of both headers."""
    digest = sha256((header() + FORMATS.read_text(encoding="utf-8")).encode()).hexdigest()[:16]
    return re.sub("(?m)^# headers: .*$", f"# headers: {digest}", STUB.read_text(encoding="utf-8"))


def write() -> None:
    """Write the header, and the digest into the stub."""
    PLACE.write_text(header(), encoding="utf-8")
    STUB.write_text(stub(), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:] != ["--check"]:
        write()
    for place, text in ((PLACE, header()), (STUB, stub())):
        if place.read_text(encoding="utf-8") != text:
            sys.exit(f"{place.relative_to(CSRC.parent)} is stale: run python csrc/make_columns.py")
