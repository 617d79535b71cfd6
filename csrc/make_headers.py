"""Write the headers csrc/numerics/columns.h and format_table.h from the declarations in python/nanwatch/.

    python csrc/make_headers.py             write them
    python csrc/make_headers.py --check     fail where they are not what this script writes

columns.h has names for the items of rows, format_table.h the number formats. The stub python/nanwatch/_C.pyi gets a
digest of both. A build keeps the digest of the stub, so that loading it shows whether it is older than the declarations
(numerics/_extension.py). Needs neither PyTorch nor nanwatch.
"""

from __future__ import annotations

import ast
import re
import runpy
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

CSRC = Path(__file__).resolve().parent
SOURCE = CSRC.parent / "python" / "nanwatch"
COLUMNS, FORMATS = CSRC / "numerics" / "columns.h", CSRC / "numerics" / "format_table.h"
STUB = SOURCE / "_C.pyi"
COLUMNS_HEAD = """\
// Names for the items of rows, of those of the kernels and those that Python has. Host and device, no torch. Written by
// csrc/make_headers.py from python/nanwatch/; `make lint` checks that it is not stale.
// clang-format off
#pragma once

#include <cstdint>

namespace nanwatch {
"""
FORMATS_HEAD = """\
// The number formats as lists of macros: X(...) is called for each. Written by csrc/make_headers.py from
// python/nanwatch/numerics/formats.py, which says what the columns mean; `make lint` checks that it is not stale.
// clang-format off
#pragma once
"""
SIGNS = {"ieee": "cleared", "fn": "cleared", "fnuz": "fnuz_nan", "signed": "twos"}


def parsed(path: str) -> list[ast.stmt]:
    """Return the statements of a module."""
    return ast.parse((SOURCE / path).read_text(encoding="utf-8")).body


def fields_of(path: str, name: str) -> list[str]:
    """Return the fields of a named tuple, in order."""
    (declared,) = (x for x in parsed(path) if isinstance(x, ast.ClassDef) and x.name == name)
    return [x.target.id for x in declared.body if isinstance(x, ast.AnnAssign)]  # type: ignore[union-attr]


def assigned(path: str, name: str) -> ast.expr:
    """Return what a module assigns to an annotated name."""
    (value,) = (
        statement.value
        for statement in parsed(path)
        if isinstance(statement, ast.AnnAssign)
        and isinstance(statement.target, ast.Name)
        and statement.target.id == name
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


def columns() -> str:
    """Return the text of the header."""
    record, formats = "records/record.py", "numerics/formats.py"
    health = [name for name in fields_of(formats, "TensorHealth") if name != "numel"]
    items = fields_of(record, "Record")
    return (
        COLUMNS_HEAD
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
        + scope("note_item", fields_of(record, "Note"), "A note as a Python tuple.")
        + f"\nconstexpr int kNoteItems = note_item::{fields_of(record, 'Note')[-1]} + 1;\n"
        + enumeration("NoteKind", ["", *choices_of(record, "NoteKind")])
        + "// These say that a non-finite value is meant.\n"
        + "inline constexpr NoteKind kExcuses[] = {"
        + ", ".join(f"NoteKind::{kind}" for kind in ast.literal_eval(assigned(record, "EXCUSES")))
        + "};\n"
        + "\n}  // namespace nanwatch\n"
    )


def short_name(name: str) -> str:
    """Return the enumerator of `Format`: f16 for float16, boolean for bool."""
    for long, short in (("bool", "boolean"), ("uint", "u"), ("int", "i"), ("float", "f")):
        name = name.replace(long, short, 1) if long in name else name
    return name


def codes(form: Any) -> str:
    """Return what describes a word of the format: the arguments of detail::FormatCodes."""
    width = form.bits // 4
    columns = [
        f"uint{form.bits}_t",
        f"Sign::{SIGNS.get(form.kind, 'none')}",
        form.is_float,
        form.kind == "ieee",
    ]
    columns += [form.smallest_word == 1, form.fraction_bits if form.is_float else 0, form.bias]
    columns += [f"0x{word:0{width}x}u" for word in (form.largest_word, form.smallest_normal_word)]
    return ", ".join(str(column).lower() if isinstance(column, bool) else str(column) for column in columns)


def formats() -> str:
    """Return the text of the header."""
    declared = runpy.run_path(str(SOURCE / "numerics" / "formats.py"))["NUMBER_FORMATS"]
    rows = [
        f"  X({short_name(form.name)}, {form.number}, {form.scalar_type}, {codes(form)})"
        for form in declared
        if form.kind != "complex"
    ]
    return (
        FORMATS_HEAD
        + "\n// enumerator, number, PyTorch's ScalarType, Word, sign, is_float, has_inf, has_zero, mantissa_bits, bias,"
        + " max_finite,\n// min_normal\n#define NANWATCH_FORMATS(X) \\\n"
        + " \\\n".join(rows)
        + "\n"
    )


def stub() -> str:
    """Return the text of the stub with the digest of both headers."""
    digest = sha256((columns() + formats()).encode()).hexdigest()[:16]
    return re.sub("(?m)^# headers: .*$", f"# headers: {digest}", STUB.read_text(encoding="utf-8"))


if __name__ == "__main__":
    for place, text in ((COLUMNS, columns()), (FORMATS, formats()), (STUB, stub())):
        if sys.argv[1:] != ["--check"]:
            place.write_text(text, encoding="utf-8")
        elif place.read_text(encoding="utf-8") != text:
            sys.exit(f"{place.relative_to(CSRC.parent)} is stale: run python csrc/make_headers.py")
