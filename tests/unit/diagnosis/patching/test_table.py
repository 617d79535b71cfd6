"""Each row of the table: its form computes what float64 gives for its pattern, and a guard is finite at the pole."""

# ruff: noqa: E501

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from nanwatch.diagnosis.patching.matching import Binding, Site, match, written
from nanwatch.diagnosis.patching.proposer import Proposer
from nanwatch.diagnosis.patching.source import find_target
from nanwatch.diagnosis.patching.table import GUARDS, STABLE, numbers_of
from nanwatch.diagnosis.provenance import Expression, Step
from nanwatch.recording.observe import observe

# Where the functions of a pattern lie, if not in torch.
_ELSEWHERE = {"ndtr": "torch.special", "poisson_nll_loss": "F", "ctc_loss": "F", "eigh": "torch.linalg",
              "normalize": "F", "cosine_similarity": "F", "layer_norm": "F", "svd": "torch.linalg"}  # fmt: skip
# The other guards need a whole program.
ROWS = [x for x in GUARDS if not x[0].startswith(("W", "log_p", "addc", "empty", "new", "Tensor", "Float"))]
# Options that a pattern's `...` stands for.
_REST = {"layer_norm": "(3,)", "ctc_loss": "steps, lengths", "unsqueeze": "-1", "logit": "1e-12", "svd": "False", "norm": "2, -1",
         "poisson_nll_loss": "False"}  # fmt: skip
# Numbers for letters that are no tensors.
_NUMBERS = {"D": "-1", "P": "0.5", "N": "2", "S": "0.5", "I": "0"}
# The operand of a guard at which its operation fails, where that is not 0.
_POLES = {"exp": 1000.0, "exp2": 1000.0, "expm1": 1000.0, "sinh": 1000.0, "cosh": 1000.0, "acos": 1.0, "asin": 1.0, "atanh": 1.0, "erfinv": 1.0, "acosh": 1.0, "log1p": -1.0,
          "A - B": -math.inf, "A * B": math.inf, "softmax": -math.inf, "log_softmax": -math.inf, "logsumexp": -math.inf,
          "poisson_nll_loss(X, Y)": 1000.0, "poisson_nll_loss(X, Y, ...)": -1.0}  # fmt: skip


class Spelt(ast.NodeTransformer):
    """Writes a pattern as a user would: `log(X)` as `torch.log(x)`."""

    def __init__(self, pattern: str) -> None:
        self._number = "1e-9" if "+ N" in pattern else "2"

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if getattr(node.func, "id", "") == "pick":
            return self.visit(node.args[0])
        if isinstance(node.func, ast.Name):
            if node.func.id == "norm" and node.keywords:
                node.args.append(ast.Constant(2))
            rest = _REST.get(node.func.id, "-1")
            extra = ast.parse(f"({rest},)", mode="eval").body.elts  # type: ignore[attr-defined]
            node.args = [y for x in node.args for y in (extra if getattr(x, "value", 0) is ... else [x])]
            node.func = ast.parse(f"{_ELSEWHERE.get(node.func.id, 'torch')}.{node.func.id}", mode="eval").body
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if len(node.id) > 1 or node.id == "F":
            return node
        return ast.Name(self._number if node.id == "N" else _NUMBERS.get(node.id, node.id.lower()))


def site_of(pattern: str, folder: Path) -> tuple[Site, ast.expr, str]:
    """Return the site of a function that returns the pattern, its expression, and its text."""
    text = ast.unparse(ast.fix_missing_locations(Spelt(pattern).visit(ast.parse(pattern, mode="eval").body)))
    arguments = "x, y, a, b, c, t, q, m, steps=None, lengths=None, p=0.5"
    source = (
        "import math\nimport torch\nfrom torch.nn import functional as F\n\n"
        f"def value({arguments}):\n    return {text}\n"
    )
    (file := folder / "value.py").write_text(source)
    # A script may use the names of parameters for numbers of its own.
    names: dict[str, Any] = {"__name__": "value", "__file__": str(file), "x": 1.0, "a": 2.0}
    exec(compile(source, str(file), "exec"), names)
    target = find_target(Expression(str(file), 6, None, names["value"].__code__))
    assert not isinstance(target, str), target
    assert isinstance(target.node, ast.FunctionDef)
    (returned,) = target.node.body
    assert isinstance(returned, ast.Return)
    assert returned.value is not None
    return Site(target, target.file), returned.value, source


def operands(pattern: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return healthy operands, inside the domain of all functions."""
    torch.manual_seed(0)
    values = {name: torch.rand(3, 3, dtype=torch.float64) * 0.8 + 0.1 for name in "xyabtqmc"}
    values["m"] = (torch.rand(3, 3) > 0.2).double()
    values["m"][:, 0] = 1
    if "acosh" in pattern:
        values["x"] = values["x"] + 1.5
    if pattern.startswith(("log(1 - exp", "log1p(X")):
        values["x"] = -values["x"]
    if "det(" in pattern:
        values["x"] = values["x"] + 3 * torch.eye(3, dtype=torch.float64)
    if "eigh" in pattern:
        values["x"] = values["x"] + values["x"].T
    if "angle" in pattern:
        values["x"] = torch.complex(values["x"], values["y"]).to(torch.complex128)
    if "dot(" in pattern:
        values["a"], values["b"] = values["a"][0], values["b"][0]
    kinds = dtype, dtype.to_complex()
    given: dict[str, Any] = {name: x.to(kinds[x.is_complex()]) for name, x in values.items()}
    if "nll_loss(log" in pattern:
        given["y"] = torch.tensor([0, 1, 2])
    if "ctc_loss" in pattern:
        scores = torch.randn(5, 2, 4, dtype=torch.float64)
        given |= {"a": scores.log_softmax(-1).to(dtype), "b": torch.tensor([[1, 2], [1, 3]])}
        given |= {"steps": torch.tensor([5, 5]), "lengths": torch.tensor([2, 2])}
    return given


def evaluate(text: str, values: dict[str, Any]) -> Any:
    result = eval(text, {"torch": torch, "F": F, "math": math, **values})
    return result if isinstance(result, Tensor) else result[0]


def text_of(edited: str) -> str:
    return edited.rpartition("return ")[2].strip()


@pytest.mark.parametrize(("pattern", "form"), [(x.pattern, x.form) for x in STABLE])
def test_a_stable_form_gives_what_float64_gives(pattern: str, form: str, tmp_path: Path) -> None:
    site, node, source = site_of(pattern, tmp_path)
    binding = match(site, pattern, node)
    assert binding is not None, source
    edited = text_of(site.file.edited(written(site, node, form, binding, numbers_of("float32"))).text)
    truth = evaluate(text_of(source), operands(pattern, torch.float64))
    value = evaluate(edited, operands(pattern, torch.float32))
    assert value.dtype == torch.float32 or value.is_complex()
    torch.testing.assert_close(value.double().reshape(truth.shape), truth, rtol=1e-3, atol=1e-4)


def test_a_letter_stands_for_one_expression(tmp_path: Path) -> None:
    site, node, _ = site_of("exp(A) / sum(exp(B))", tmp_path)
    assert match(site, "exp(A) / sum(exp(B))", node) is not None
    assert match(site, "exp(X) / sum(exp(X))", node) is None


def test_a_form_of_a_call_in_place_stays_in_place(tmp_path: Path) -> None:
    site, node, _ = site_of("X.div_(norm(X, dim=D, keepdim=True))", tmp_path)
    bound = match(site, "X / norm(X, dim=D, keepdim=True)", node) or Binding()
    edits = written(site, node, "F.normalize(X, dim=D)", bound, {})
    assert edits[0].text == "x.copy_(F.normalize(x, dim=-1))"


def test_each_change_is_proposed_once(tmp_path: Path) -> None:
    site, _, _ = site_of("log(log(X))", tmp_path)  # the operand was made by another one of its kind
    given = observe(torch.tensor(-math.inf), "", "input")
    step = Step(0, "aten.log.default", operands=(given,), place=Expression(site.file.name, 6))
    edits = [x.edits for x in Proposer(site, step, lambda _: {}).proposals()]
    assert len(set(edits)) == len(edits) > 1


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]} {row[2]} {row[3]}")
def test_a_guard_is_finite_at_the_pole_and_moves_no_healthy_value(
    row: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pattern, _, form, condition, *_ = row
    site, node, source = site_of(pattern, tmp_path)
    bound = {inner: [torch.tensor(7.0)] for inner in ast.walk(node) if isinstance(inner, ast.Name)}
    monkeypatch.setattr(Proposer, "_holds", lambda *_: True)
    proposer = Proposer(site, Step(0, "", place=Expression(site.file.name, 6)), lambda _: bound)
    proposal = [*proposer.changes(node, row)][-1]
    edited = text_of(site.file.edited(proposal.edits).text)
    values = operands(pattern, torch.float32)
    if condition in ("int", "number"):
        assert evaluate(edited, {**values, "b": 0}).isfinite().all()
        return
    if condition == "count":
        values = {name: x + 2 if isinstance(x, Tensor) else x for name, x in values.items()}
    wide = {key: x.double() for key, x in values.items() if isinstance(x, Tensor) and x.is_floating_point()}
    name = pattern.partition("(")[0]
    # Another divisor or another matrix moves them.
    if name not in ("std", "var", "mean", "eigh", "svd"):
        truth, value = evaluate(text_of(source), values | wide), evaluate(edited, values)
        torch.testing.assert_close(value.to(truth), truth, rtol=1e-2, atol=3e-3)
    if name in ("ctc_loss", "cosine_similarity", "logit", "layer_norm", "normalize"):
        return  # which are finite at any pole that their form could have
    pole = _POLES.get(pattern, _POLES.get(name, 0.0))
    hit = "b" if "B" in pattern and name != "hypot" else "x"
    if pattern == "A * B":
        hit, other = ("a", "b") if "B == 0" in form else ("b", "a")
        values[other] = torch.zeros(3, 3)
    shape = {"mean": (0, 3), "std": (3, 1), "var": (3, 1)}.get(name, (3, 3))
    failing = torch.full(shape, pole, dtype=values[hit].dtype)
    values[hit] = failing.requires_grad_()
    values |= {"hypot": {"a": failing, "b": failing}, "atan2": {"y": torch.zeros(3, 3)}}.get(name, {})
    result = evaluate(edited, values)
    assert result.isfinite().all(), edited
    (gradient,) = torch.autograd.grad(result.abs().sum(), values[hit], allow_unused=True)
    is_bounded = form.endswith(("clamp(min=0)", "clamp(-1, 1)"))
    is_bounded |= name in ("eigh", "svd", "mean", "std", "softmax")
    assert is_bounded or gradient is None or gradient.isfinite().all(), edited
