"""Write csrc/numerics/format_table.h, the number formats for C++, from python/nanwatch/numerics/formats.py.

    python csrc/make_formats.py             write it
    python csrc/make_formats.py --check     fail where it is not what this script writes

Needs neither PyTorch nor nanwatch: the declaration is run as a file.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from typing import Any

import make_columns

CSRC = Path(__file__).resolve().parent
SOURCE = CSRC.parent / "python" / "nanwatch" / "numerics" / "formats.py"
PLACE = CSRC / "numerics" / "format_table.h"
HEAD = """\
// The number formats as lists of macros: X(...) is called for each. Written by csrc/make_formats.py from
// python/nanwatch/numerics/formats.py, which says what the columns mean; `make lint` checks that it is not stale.
// clang-format off
#pragma once
"""
SIGNS = {"ieee": "cleared", "fn": "cleared", "fnuz": "fnuz_nan", "signed": "twos"}


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


def macro(name: str, columns: str, rows: list[str]) -> str:
    """Return a list of rows with a comment that names their columns."""
    calls = " \\\n".join(f"  X({row})" for row in rows)
    return f"\n// {columns}\n#define {name}(X) \\\n{calls}\n"


def header() -> str:
    """Return the text of the header."""
    formats = runpy.run_path(str(SOURCE))["NUMBER_FORMATS"]
    real = [form for form in formats if form.kind != "complex"]
    enumerators = [f"{short_name(form.name)}, {form.number}, {form.scalar_type}" for form in real]
    return (
        HEAD
        + macro(
            "NANWATCH_FORMATS",
            "enumerator, number, PyTorch's ScalarType, Word, sign, is_float, has_inf, has_zero, mantissa_bits, bias, "
            "max_finite,\n// min_normal",
            [f"{known}, {codes(form)}" for known, form in zip(enumerators, real, strict=True)],
        )
        + macro(
            "NANWATCH_COMPLEX_FORMATS",
            "number, PyTorch's ScalarType",
            [f"{form.number}, {form.scalar_type}" for form in formats if form.kind == "complex"],
        )
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        if PLACE.read_text(encoding="utf-8") != header():
            sys.exit(f"{PLACE.relative_to(CSRC.parent)} is stale: run python csrc/make_formats.py")
    else:
        PLACE.write_text(header(), encoding="utf-8")
        make_columns.write()  # the digest of this header
