"""Guards of a divisor: a clamp only where the source shows that the value has no sign."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from nanwatch.diagnosis.patching.code_swap import find_target
from nanwatch.diagnosis.patching.guards import Facts, guarded, is_nonnegative
from nanwatch.diagnosis.patching.site import Site

SOURCE = """\
import torch

def ratio(x, t, mask, self):
    square = x * x
    n = x.norm(dim=-1)
    y = x / ({divisor})
    return y
"""


def site_of(divisor: str, folder: Path) -> Site:
    """The division by this, in a module that is imported."""
    file = folder / "ratio.py"
    file.write_text(SOURCE.format(divisor=divisor))
    names: dict[str, object] = {"__name__": "ratio", "__file__": str(file)}
    exec(compile(file.read_text(), str(file), "exec"), names)
    globals()["_held"] = names["ratio"]  # a function is found while something refers to it
    target = find_target(str(file), 6)
    assert not isinstance(target, str), target
    return Site(target, 6)


@pytest.mark.parametrize(
    ("divisor", "has_no_sign"),
    [
        ("n", True),
        ("square", True),
        ("square.sum(-1, keepdim=True)", True),
        ("mask.sum()", True),
        ("(t > 0).sum()", True),
        ("t.abs().mean() * n", True),
        ("t.clamp(min=0)", True),
        ("t**2 + 1e-6", True),
        ("torch.softmax(t, -1)[0]", True),
        ("t", False),
        ("t.sum()", False),
        ("t.clamp(min=-1)", False),
        ("t**3", False),
        ("n - square", False),
        ("self.s", False),
    ],
)
def test_a_divisor_is_clamped_only_without_a_sign(divisor: str, has_no_sign: bool, tmp_path: Path) -> None:
    site = site_of(divisor, tmp_path)
    (spelt,) = [one for one in site.expressions() if one.name == "div"]
    assert is_nonnegative(site, spelt.args[1]) == has_no_sign
    first = next(guarded(site, spelt, Facts("div", "float32", False)))
    assert ast.parse(first.text)
    assert ("torch.where(" in first.text) != has_no_sign
