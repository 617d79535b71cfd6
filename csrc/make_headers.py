"""Write the headers csrc/numerics/columns.h and format_table.h from the declarations in python/nanwatch/.

    python csrc/make_headers.py             write them
    python csrc/make_headers.py --check     fail where they are not what this script writes

columns.h has names for the items of rows, format_table.h the number formats. The stub python/nanwatch/_C.pyi gets a
digest of both. A build keeps the digest of the stub, so that loading it shows whether it is older than the declarations
(numerics/_extension.py). Needs no PyTorch.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from string import Template
from types import ModuleType
from typing import Any, get_args

CSRC = Path(__file__).resolve().parent
SOURCE = CSRC.parent / "python" / "nanwatch"
COLUMNS, FORMATS = CSRC / "numerics" / "columns.h", CSRC / "numerics" / "format_table.h"
STUB = SOURCE / "_C.pyi"
COLUMNS_TEXT = Template("""\
// Names for the items of rows, of those of the kernels and those that Python has. Host and device, no torch. Written by
// csrc/make_headers.py from python/nanwatch/; `make lint` checks that it is not stale.
// clang-format off
#pragma once

#include <cstdint>

namespace nanwatch {

// A row of the health operator. A range is its first kRangeColumns; a row from a device has all of them.
namespace column {
enum Item : int { $health, is_mask };
}  // namespace column

constexpr int kRangeColumns = column::isfinite + 1;
constexpr int kHealthColumns = column::$last_health + 1;
constexpr int kDeviceColumns = column::is_mask + 1;

// A record as a Python tuple.
namespace record_item {
enum Item : int { $record };
}  // namespace record_item

constexpr int kRecordItems = record_item::$last_record + 1;
$roles$phases
// A note as a Python tuple.
namespace note_item {
enum Item : int { $note };
}  // namespace note_item

constexpr int kNoteItems = note_item::$last_note + 1;
$note_kinds// These say that a non-finite value is meant.
inline constexpr NoteKind kExcuses[] = {$excuses};

}  // namespace nanwatch
""")
FORMATS_TEXT = """\
// The number formats as lists of macros: X(...) is called for each. Written by csrc/make_headers.py from
// python/nanwatch/numerics/formats.py, which says what the columns mean; `make lint` checks that it is not stale.
// clang-format off
#pragma once

// enumerator, number, PyTorch's ScalarType, Word, sign, is_float, has_inf, has_zero, mantissa_bits, bias, max_finite,
// min_normal
#define NANWATCH_FORMATS(X) \\
"""
SIGNS = {"ieee": "cleared", "fn": "cleared", "fnuz": "fnuz_nan", "signed": "twos"}


def declarations(name: str) -> Any:
    """Import a module of nanwatch as if the package had no `__init__.py`, which imports PyTorch."""
    if "nanwatch" not in sys.modules:
        package = sys.modules["nanwatch"] = ModuleType("nanwatch")
        package.__path__ = [str(SOURCE)]
    return import_module(f"nanwatch.{name}")


def enumeration(name: str, texts: Sequence[str]) -> str:
    """Return an enumeration and the texts of its enumerators in Python; "" is `none`."""
    spelt = ", ".join(f'"{text}"' for text in texts)
    return (
        f"\nenum class {name} : uint8_t {{ {', '.join(text or 'none' for text in texts)} }};\n"
        f"inline constexpr const char* k{name}s[] = {{{spelt}}};\n"
    )


def columns() -> str:
    """Return the text of the header."""
    record = declarations("records.record")
    health = [name for name in declarations("numerics.formats").TensorHealth._fields if name != "numel"]
    items: dict[str, Sequence[str]] = {
        "health": health,
        "record": record.Record._fields,
        "note": record.Note._fields,
        "excuses": [f"NoteKind::{kind}" for kind in record.EXCUSES],
    }
    return COLUMNS_TEXT.substitute(
        {name: ", ".join(texts) for name, texts in items.items()},
        **{f"last_{name}": texts[-1] for name, texts in items.items()},
        roles=enumeration("Role", get_args(record.Role)),
        phases=enumeration("Phase", get_args(record.Phase)),
        note_kinds=enumeration("NoteKind", ("", *record.NOTE_KINDS)),
    )


def short_name(name: str) -> str:
    """Return the enumerator of `Format`: f16 for float16, boolean for bool."""
    for long, short in (("bool", "boolean"), ("uint", "u"), ("int", "i"), ("float", "f")):
        name = name.replace(long, short, 1) if long in name else name
    return name


def codes(form: Any) -> str:
    """Return what describes a word of the format: the arguments of FormatCodes."""
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
    rows = [
        f"  X({short_name(form.name)}, {form.number}, {form.scalar_type}, {codes(form)})"
        for form in declarations("numerics.formats").NUMBER_FORMATS
        if form.kind != "complex"
    ]
    return FORMATS_TEXT + " \\\n".join(rows) + "\n"


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
