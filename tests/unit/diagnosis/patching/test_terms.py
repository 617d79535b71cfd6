"""Terms: one spelling for every way to write an operation."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest

from nanwatch.diagnosis.patching.terms import Operand, Reader, Term
from support.source_site import returned


def spelt(reader: Reader, operand: Operand, depth: int = 3) -> str:
    """A term and those inside it as calls of plain names."""
    number = reader.number(operand)
    if number is not None:
        return f"{number:g}"
    term = reader.term(operand) if depth else None
    if term is None:
        return ast.unparse(operand) if isinstance(operand, ast.expr) else str(operand)
    return f"{term.name}({', '.join(spelt(reader, one, depth - 1) for one in term.args)})"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x.square()", "pow(x, 2)"),
        ("x * x", "pow(x, 2)"),
        ("x ** 0.5", "sqrt(x)"),
        ("torch.rsqrt(x)", "div(1, sqrt(x))"),
        ("x ** -0.5", "div(1, sqrt(x))"),
        ("x.reciprocal()", "div(1, x)"),
        ("torch.log1p(x)", "log(add(1, x))"),
        ("x.expm1()", "sub(exp(x), 1)"),
        ("x / 4", "mul(0.25, x)"),
        ("x * -1", "neg(x)"),
        ("0 - x", "neg(x)"),
        ("x + -2", "sub(x, 2)"),
        ("-x + y", "sub(y, x)"),
        ("x - -y", "add(x, y)"),
        ("torch.mm(x, y)", "matmul(x, y)"),
        ("x.absolute()", "abs(x)"),
        ("x.norm(p=2)", "norm(x)"),
        ("x.norm(p=1)", "norm_of_other_order(x)"),
        ("0.5 * (1 + torch.erf(x / math.sqrt(2)))", "ndtr(x)"),
        ("x[:, None]", "column(x)"),
        ("x.unsqueeze(0)", "row(x)"),
        ("x.shape[0]", "size(x)"),
        ("x.transpose(0, 1)", "T(x)"),
        ("x.T", "T(x)"),
    ],
)
def test_every_spelling_is_one_term(tmp_path: Path, text: str, expected: str) -> None:
    """As the table of forms writes it."""
    site, value = returned(text, tmp_path)
    assert spelt(Reader(site), value) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2 * math.pi", 2 * math.pi), ("math.sqrt(2) / 2", math.sqrt(0.5)), ("1 / 0", None), ("x", None), ("2 ** 3", 8)],
)  # fmt: skip
def test_a_number_is_what_python_makes_of_it(tmp_path: Path, text: str, expected: float | None) -> None:
    """Of constants and functions of `math`; where Python raises there is none."""
    site, value = returned(text, tmp_path)
    assert Reader(site).number(value) == (pytest.approx(expected) if expected is not None else None)


def test_the_same_is_what_is_written_the_same(tmp_path: Path) -> None:
    """A name is what was assigned to it, unless that has changed since."""
    site, value = returned("a = x + 1\n(a, x + 1, x + 2, 2, 2.0)", tmp_path)
    assert isinstance(value, ast.Tuple)
    a, once, other, two, also_two = value.elts
    reader = Reader(site)
    assert reader.same(a, once)
    assert not reader.same(a, other)
    assert reader.same(two, also_two)
    assert not reader.same(two, once)
    assert reader.same(Term("exp", (a,)), Term("exp", (a,)))
