"""The statement that failed: its operations however they are spelt, and what its names stand for."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from support.source_site import returned


@pytest.mark.parametrize(
    ("text", "name", "args", "kwargs"),
    [
        ("x / y", "div", ["x", "y"], {}),
        ("torch.div(x, y)", "div", ["x", "y"], {}),
        ("x.true_divide(y)", "div", ["x", "y"], {}),
        ("torch.div(input=x, other=y)", None, [], {}),
        ("-x", "neg", ["x"], {}),
        ("x @ y", "matmul", ["x", "y"], {}),
        ("x.clip(min=0)", "clamp", ["x"], {"min": "0"}),
        ("torch.linalg.vector_norm(x, dim=-1)", "norm", ["x"], {"dim": "-1"}),
        ("F.softmax(x, -1)", "softmax", ["x", "-1"], {}),
        ("torch.softmax(input=x, dim=0)", "softmax", ["x"], {"dim": "0"}),
        ("x.sqrt_()", "sqrt", ["x"], {}),
        ("torch.add(*x)", None, [], {}),
        ("x", None, [], {}),
    ],
)
def test_an_operation_has_one_name(
    tmp_path: Path, text: str, name: str | None, args: list[str], kwargs: dict[str, str]
) -> None:
    """Operator, method and function alike; the object of a method is the first operand."""
    site, value = returned(text, tmp_path)
    spelt = site.spelt(value)
    if name is None:
        assert spelt is None
        return
    assert spelt is not None
    assert (spelt.name, [ast.unparse(x) for x in spelt.args]) == (name, args)
    assert {key: ast.unparse(x) for key, x in spelt.kwargs.items()} == kwargs


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2.5", 2.5), ("-3", -3), ("math.pi", math.pi), ("EPS", 1e-6), ("torch.pi", math.pi), ("float('inf')", math.inf),
     ("float(y)", None), ("x", None), ("True", True), ("'2'", None)],
)  # fmt: skip
def test_a_constant_is_what_python_makes_of_it(tmp_path: Path, text: str, expected: float | None) -> None:
    """Of the module's names and of modules; nothing that depends on the call."""
    site, value = returned(text, tmp_path, EPS=1e-6)
    assert site.constant(value) == expected


def test_a_name_is_its_last_definition(tmp_path: Path) -> None:
    """Written out only while all that it was made of is unchanged; a name of a tuple has no definition."""
    site, value = returned("w = x + y\nw = x * y\na, b = x, y\nw + a", tmp_path)
    assert isinstance(value, ast.BinOp)
    made = site.definition(value.left)
    assert made is not None
    assert ast.unparse(made) == "x * y"
    assert site.written_out(value.left) is made
    assert site.definition(value.right) is None
    assert site.definitions() == [3]
    assert site.num_uses(value.left) == 1
    changed, value = returned("w = x * y\nx = x + 1\nw + z", tmp_path)
    assert isinstance(value, ast.BinOp)
    assert changed.written_out(value.left) is value.left


def test_texts_keep_their_value_in_an_expression(tmp_path: Path) -> None:
    """With the brackets that an attribute or an operand needs."""
    site, value = returned("torch.exp(x + y)", tmp_path)
    assert isinstance(value, ast.Call)
    inner = value.args[0]
    assert (site.text(inner), site.primary(inner), site.operand(inner)) == ("x + y", "(x + y)", "(x + y)")
    assert (site.primary(value), site.covers(inner)) == ("torch.exp(x + y)", True)
    assert [site.text(one) for one in site.ancestors(inner)] == ["torch.exp(x + y)"]


def test_modules_have_the_names_of_the_file(tmp_path: Path) -> None:
    """An alias goes before the dotted name; a module that the file does not know has none."""
    site, value = returned("torch.exp(x)", tmp_path)
    assert (site.torch, site.functional, site.module(math, "math")) == ("torch", "F", "math")
    assert site.called(value) is torch.exp
    other, _ = returned("x", tmp_path, torch=None, F=None, functional=F, math=None)
    assert (other.torch, other.functional, other.module(math, "math")) == ("", "functional", "")
