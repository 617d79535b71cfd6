"""Texts of forms: letters in their brackets, numbers as people write them, signs that meet."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest

from nanwatch.diagnosis.patching.form_text import NoForm, Writer
from nanwatch.diagnosis.patching.terms import Operand, Reader
from support.source_site import returned


def written(folder: Path, form: str, **texts: str | float) -> str:
    """The form with these expressions for its letters."""
    named = {name: text for name, text in texts.items() if isinstance(text, str)}
    site, value = returned(f"(x, {', '.join(named.values())})", folder)
    assert isinstance(value, ast.Tuple)
    letters: dict[str, Operand] = dict(zip(named, value.elts[1:], strict=True))
    letters |= {name: number for name, number in texts.items() if isinstance(number, float)}

    def no_log(_: Operand) -> tuple[str, int, bool]:
        raise NoForm

    return Writer(site, Reader(site), letters, no_log).write(ast.parse(form, mode="eval").body)[0]


@pytest.mark.parametrize(
    ("form", "letters", "expected"),
    [
        ("a * b", {"a": "x + y", "b": "z"}, "(x + y) * z"),
        ("a - b", {"a": "x", "b": "y - z"}, "x - (y - z)"),
        ("a + b", {"a": "x", "b": "-y"}, "x - y"),
        ("-a", {"a": "-x"}, "x"),
        ("-a", {"a": "x + y"}, "-(x + y)"),
        ("a**2", {"a": "x * y"}, "(x * y)**2"),
        ("x.abs()", {"x": "y + z"}, "(y + z).abs()"),
        ("n * x", {"x": "y", "n": math.pi}, "math.pi * y"),
        ("n * x", {"x": "y", "n": 1e-6}, "1e-6 * y"),
        ("n * x", {"x": "y", "n": 0.5}, "0.5 * y"),
        ("torch.exp(x)", {"x": "y"}, "torch.exp(y)"),
        ("F.softplus(x)", {"x": "y"}, "F.softplus(y)"),
        ("LOG(x)", {"x": "y"}, "torch.log(y)"),
        ("LOG(n)", {"n": 2.0}, "math.log(2.0)"),
    ],
)
def test_a_form_is_written_with_the_brackets_that_it_needs(
    tmp_path: Path, form: str, letters: dict[str, str | float], expected: str
) -> None:
    assert written(tmp_path, form, **letters) == expected


@pytest.mark.parametrize(
    ("form", "letters"),
    [("MUST(x)", {"x": "y"}), ("LOG(x)", {"x": "y > 0"}), ("LOG(n)", {"n": -1.0}), ("LOG(x)", {"x": "padding_mask"})],
)  # fmt: skip
def test_what_has_no_simpler_logarithm_has_no_form(
    tmp_path: Path, form: str, letters: dict[str, str | float]
) -> None:
    """A mask of zeros and ones, a number that is not positive, and what must have one."""
    with pytest.raises(NoForm):
        written(tmp_path, form, **letters)
