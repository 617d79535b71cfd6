"""Stable forms are nearer to the truth, computed in float64, than what they take the place of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nanwatch.diagnosis.patching.code_swap import find_target
from nanwatch.diagnosis.patching.guards import Facts
from nanwatch.diagnosis.patching.rules import changes
from nanwatch.diagnosis.patching.site import Site

SOURCE = """\
import torch
from torch.nn import functional as F

def value(x):
    return {expression}
"""


@pytest.mark.parametrize(
    "expression",
    [
        "torch.log(1 - torch.tanh(x).pow(2))",
        "torch.log(torch.sigmoid(x))",
        "torch.log(1 - torch.sigmoid(x))",
        "torch.log(1 + torch.exp(x))",
        "torch.log(torch.softmax(x, dim=-1))",
        "torch.log(torch.exp(x).sum(-1))",
    ],
)
def test_a_stable_form_is_proposed_first_and_is_nearer(expression: str, tmp_path: Path) -> None:
    file = tmp_path / "value.py"
    file.write_text(SOURCE.format(expression=expression))
    names: dict[str, object] = {"__name__": "value", "__file__": str(file)}
    exec(compile(file.read_text(), str(file), "exec"), names)
    function = names["value"]  # it is found while something refers to it
    target = find_target(str(file), 5)
    assert not isinstance(target, str), target
    change = next(changes(Site(target, 5), Facts("log", "float32", False)))
    assert change.is_stable
    assert function is names["value"]
    (edit,) = change.edits
    x = torch.linspace(-8, 8, 101).reshape(1, -1)
    truth = eval(expression, {"torch": torch, "F": F, "x": x.double()})

    def error(text: str, x: Tensor) -> float:
        return float((eval(text, {"torch": torch, "F": F, "x": x}) - truth).norm())

    # A form without rounding of its own may be as near already.
    assert error(edit.text, x) <= max(error(expression, x), 1e-6 * float(truth.norm()))
    assert bool(eval(edit.text, {"torch": torch, "F": F, "x": 20 * x}).isfinite().all())


def test_a_form_calls_no_model_that_another_statement_calls(tmp_path: Path) -> None:
    """`d` is written out in the form only where that draws nothing and calls no module a second time."""
    source = (
        "import torch\n\ndef value(model, x):\n    d = (model(x) - 1).square().sum(-1)\n    return d.sqrt()\n"
    )
    file = tmp_path / "value.py"
    file.write_text(source)
    names: dict[str, object] = {"__name__": "value", "__file__": str(file)}
    exec(compile(source, str(file), "exec"), names)
    target = find_target(str(file), 5)
    assert not isinstance(target, str), target
    texts = [
        edit.text
        for change in changes(Site(target, 5), Facts("sqrt", "float32", True))
        for edit in change.edits
    ]
    assert texts
    assert not any("model(" in text for text in texts)
