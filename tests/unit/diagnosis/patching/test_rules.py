"""changes: the first change of an expression is finite where that was not, and equals it where it was healthy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanwatch.diagnosis.patching.code_swap import find_target
from nanwatch.diagnosis.patching.guards import Facts
from nanwatch.diagnosis.patching.rules import changes, operation_name
from nanwatch.diagnosis.patching.site import Change, Site
from nanwatch.diagnosis.patching.source import Target

INF = float("inf")

# The operation, an expression of x, a value of x with which it or its gradient is not finite, and a healthy one.
CASES: list[tuple[str, str, Any, Any]] = [
    ("div", "1 - y / x", 0.0, 2.0),
    ("div", "torch.div(y, x)", 0.0, 2.0),
    ("div", "y.div(x)", 0.0, 2.0),
    ("div", "y.true_divide(x * x)", 0.0, 2.0),
    ("div", "y / (x + 1e-46)", 0.0, 2.0),
    ("reciprocal", "1 / x", 0.0, 2.0),
    ("reciprocal", "x.reciprocal()", 0.0, 2.0),
    ("sqrt", "torch.sqrt(x)", 0.0, 2.0),
    ("sqrt", "x.square().sqrt()", 0.0, 2.0),
    ("sqrt", "torch.sqrt(x.clamp(0, 3))", 0.0, 2.0),
    ("rsqrt", "torch.rsqrt(x)", 0.0, 2.0),
    ("pow", "x ** 0.5", 0.0, 2.0),
    ("pow", "x.pow(0.25)", 0.0, 2.0),
    ("pow", "torch.pow(x, -0.5)", 0.0, 2.0),
    ("log", "torch.log(x)", 0.0, 2.0),
    ("log", "x.log().sum()", 0.0, 2.0),
    ("log2", "torch.log2(input=x)", 0.0, 2.0),
    ("log1p", "torch.log1p(-x)", 1.0, 0.5),
    ("exp", "torch.exp(x)", 100.0, 2.0),
    ("exp", "(x * 2).exp()", 100.0, 2.0),
    ("acos", "torch.acos(x)", 1.5, 0.5),
    ("asin", "x.clamp(-1, 1).asin()", 1.0, 0.5),
    ("atanh", "torch.arctanh(x)", 1.0, 0.5),
    ("acosh", "torch.acosh(x)", 1.0, 2.0),
    ("erfinv", "torch.erfinv(x)", 1.0, 0.5),
    ("logit", "x.logit()", 0.0, 0.5),
    ("_softmax", "torch.softmax(x.expand(1, 2), dim=-1)[:, :1]", -INF, 2.0),
    ("mul", "z * x", INF, 2.0),
    ("sub", "(x - x.amax()).exp()", -INF, 2.0),
    ("lgamma", "torch.lgamma(x)", 0.0, 2.0),
    ("logit", "torch.logit(x, eps=0.0)", 0.0, 0.5),
    ("linalg_vector_norm", "F.normalize(x, dim=0, eps=0.0)", 0.0, 2.0),
    ("poisson_nll_loss", "F.poisson_nll_loss(x, y, log_input=False, eps=0.0)", 0.0, 2.0),
    ("poisson_nll_loss", "F.poisson_nll_loss(x, y)", 100.0, 2.0),
    # Of one value, or of none.
    ("mean", "x[x > 5].mean()", 2.0, 9.0),
    ("mean", "torch.mean(x[x > 5], dim=-1)", 2.0, 9.0),
    ("mean", "x[x > 5].mean(-1, keepdim=True)", 2.0, 9.0),
    ("mse_loss", "F.mse_loss(x[x > 5], 2 * x[x > 5])", 2.0, 9.0),
    ("nll_loss_forward", "F.cross_entropy(x[None], torch.where(x < 5, -100, 0))", 2.0, 9.0),
    ("nll_loss_forward", "F.cross_entropy(x[None], (x < 5).long(), ignore_index=1)", 2.0, 9.0),
    (
        "_ctc_loss",
        "F.ctc_loss((x * y * torch.ones(1, 1, 3)).log_softmax(-1), torch.ones(1, 2).long(), (y.long(),), (2,))",
        2.0,
        None,
    ),
    (
        "_ctc_loss",
        "F.ctc_loss(x * torch.ones(1, 1, 3), torch.ones(1, 2).long(), (1,), (2,), zero_infinity=False)",
        2.0,
        None,
    ),
    # Of equal eigenvalues or singular values.
    ("linalg_eigh", "torch.linalg.eigh(torch.eye(2) * x)[1].sum()", 2.0, None),
    ("linalg_svd", "torch.linalg.svd(torch.eye(2) * x)[0].sum()", 2.0, None),
    # Stable forms.
    ("exp", "torch.log(1 + torch.exp(x))", 100.0, 2.0),
    ("exp", "torch.log1p(x.exp())", 100.0, 2.0),
    ("log", "torch.log(torch.sigmoid(x))", -200.0, 2.0),
    ("log", "(1 - torch.sigmoid(x)).log()", 200.0, 2.0),
    ("log", "torch.softmax(torch.cat([x, x - 300]), dim=0).log()[1:]", 2.0, None),
    ("log", "torch.exp(x.expand(2, 1)).sum(0).log()", -200.0, 2.0),
    ("log", "torch.log(1 - torch.tanh(x).pow(2))", 20.0, 2.0),
    ("log", "torch.log(x / (1 - x))", 1.0, 0.5),
    ("cosh", "torch.log(x.cosh())", -200.0, 2.0),
    ("log", "torch.log(x.exp() / torch.exp(x.expand(2, 1) - 1).sum(0))", -200.0, 2.0),
    ("exp", "(x.exp() / (x.exp() + (x * 2).exp())).log()", 200.0, 2.0),
    ("exp", "x.exp().cumsum(0).log()", 200.0, 2.0),
    ("log", "x.exp().log()", -200.0, 2.0),
]


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(body: str, **names: Any) -> Site:
        path = tmp_path / "rules_program.py"
        path.write_text(f"def f(x, y, z):\n{body}\n")
        space = {"torch": torch, "F": F, "nn": nn, "math": math, **names}
        exec(compile(path.read_text(), str(path), "exec"), space)
        line = body.count("\n") + 2
        target = find_target(str(path), line)
        assert isinstance(target, Target), target
        # The functions of a target are found among all objects: this one must live on.
        write.kept = space  # type: ignore[attr-defined]
        return Site(target, line)

    return write


def run(text: str, value: float) -> tuple[Tensor, Tensor]:
    """The result of the function of this source, and the gradient of its sum."""
    space: dict[str, Any] = {"torch": torch, "F": F, "nn": nn, "math": math}
    exec(text, space)
    x = torch.full((1,), value, requires_grad=True)
    y, z = torch.ones(1), torch.zeros(1)
    with torch.enable_grad():
        result: Tensor = space["f"](x * 1.0, y, z)
        (gradient,) = torch.autograd.grad(result.sum(), [x])
    return result.detach(), gradient


def is_finite(text: str, value: float) -> bool:
    return all(bool(one.isfinite().all()) for one in run(text, value))


def edited(site: Site, change: Change) -> str:
    return site.file.edited(change.edits).text


@pytest.mark.parametrize(("operation", "expression", "bad", "healthy"), CASES, ids=[one[1] for one in CASES])
def test_a_change_ends_the_failure_and_leaves_healthy_values(
    write: Any, operation: str, expression: str, bad: float, healthy: float | None
) -> None:
    site = write(f"    return {expression}")
    assert not is_finite(site.file.text, bad)
    proposed = list(changes(site, Facts(operation, "float32", backward=True)))
    works = [one for one in proposed[:4] if is_finite(edited(site, one), bad)]
    assert works, [edited(site, one) for one in proposed]
    if healthy is not None:
        (before, _), (after, _) = run(site.file.text, healthy), run(edited(site, works[0]), healthy)
        torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-6)
    assert edited(site, works[0]).count("\n") == site.file.text.count("\n")


def texts(site: Site, facts: Facts) -> Iterator[str]:
    return (edited(site, one).splitlines()[site.line - 1].strip() for one in changes(site, facts))


@pytest.mark.parametrize(
    ("facts", "line", "first"),
    [
        (
            Facts("div", "float32", False, frozenset({1})),
            "return y / x.sum()",
            "return y / x.sum().clamp(min=1)",
        ),
        (Facts("div", "float16", False), "return y / (x + 1e-8)", "return y / (x + 1e-4)"),
        (Facts("div", "float16", False), "return y / x.clamp_min(1e-8)", "return y / x.clamp(min=1e-4)"),
        (
            Facts("div", "float32", False),
            "return y / (x - 1)",
            "return y / torch.where((x - 1).abs() < 1e-8, 1e-8, x - 1)",
        ),
        (Facts("div", "float32", False), "x /= y.square()", "x /= y.square().clamp(min=1e-8)"),
        (Facts("std", "float32", False), "return x.std()", "return x.std(unbiased=False)"),
        (Facts("var", "float32", False), "return x.var(0, correction=1)", "return x.var(0, correction=0)"),
        (Facts("mean", "float32", False), "return -x.mean()", "return -(x.sum() / max(x.numel(), 1))"),
        (
            Facts("linalg_vector_norm", "float16", False),
            "return F.normalize(x)",
            "return F.normalize(x, eps=1e-4)",
        ),
        (
            Facts("sqrt", "float32", True),
            "return torch.where(x > 1, torch.sqrt(x), y)",
            "return torch.where(x > 1, torch.sqrt(torch.where(x > 1, x, 1.0)), y)",
        ),
        (
            Facts("log", "float32", True),
            "return torch.where(x > 1, y, x.log())",
            "return torch.where(x > 1, y, torch.where(x > 1, 1.0, x).log())",
        ),
        (
            Facts("log", "float32", False),
            "return -(x * torch.log(x)).sum()",
            "return -torch.xlogy(x, x).sum()",
        ),
        (
            Facts("div", "float32", False, numbers=((1, 0),)),
            "return y / (x.dim() - 1)",
            "return y / max(x.dim() - 1, 1)",
        ),
        (
            Facts("div", "float32", False, numbers=((1, 0.0),)),
            "return y / x.item()",
            "return y / max(x.item(), 1e-8)",
        ),
        (
            Facts("sqrt", "float32", True, frozenset({0})),
            "return degree.sqrt()",
            "return degree.clamp(min=1).sqrt()",
        ),
        *(
            # Whole numbers, but the name says of none of these that they count something.
            (Facts("div", "float32", False, frozenset({1})), f"return y / {name}", f"return y / {guarded}")
            for name, guarded in (
                ("numerator", "torch.where(numerator.abs() < 1e-8, 1e-8, numerator)"),
                ("discount", "torch.where(discount.abs() < 1e-8, 1e-8, discount)"),
                ("num_tokens", "num_tokens.clamp(min=1)"),
                ("nValid", "nValid.clamp(min=1)"),
            )
        ),
        (Facts("sqrt", "float32", False), "return x.sqrt()", "return x.clamp(min=0).sqrt()"),
        (Facts("mul", "float32", False), "x *= y", "x *= torch.where(x == 0, 0.0, y)"),
        (
            Facts("angle", "float32", True),
            "return torch.angle(x)",
            "return torch.atan2(x.imag, x.real)",
        ),
        (
            Facts("_softmax", "float32", False),
            'return x.masked_fill(y > 0, float("-inf")).softmax(-1)',
            'return x.masked_fill(y > 0, float("-inf")).clamp(min=-1e30).softmax(-1)',
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_the_first_change(write: Any, facts: Facts, line: str, first: str) -> None:
    assert next(texts(write(f"    {line}"), facts)) == first


def test_nothing_is_proposed_for_what_has_no_pole(write: Any) -> None:
    """A whole power overflows, and a sum of finite numbers holds no infinity."""
    site = write("    return y / (x**3 + y)")
    assert not list(texts(site, Facts("pow", "float32", False, finite=True)))
    found = list(texts(site, Facts("div", "float32", False, finite=True)))
    assert found
    assert not any("-1e30" in one or "x.clamp" in one for one in found)


def test_a_row_that_is_masked_everywhere_sees_everything(write: Any) -> None:
    """The softmax is in nn.MultiheadAttention, so its caller's mask is changed, and only the row that fails."""
    site = write("    return attention(x, y, z, key_padding_mask=mask)[0]")
    found = [edited(site, one) for one in changes(site, Facts("_softmax", "float32", False))]
    (text,) = (one for one in found if ".all(" in one)
    attention = nn.MultiheadAttention(4, 1, batch_first=True)
    mask = torch.tensor([[True, True, True], [True, False, False]])  # True: masked
    results = []
    for source in (site.file.text, text):
        space: dict[str, Any] = {"attention": attention, "mask": mask}
        exec(source, space)
        x = torch.linspace(-1, 1, 24).reshape(2, 3, 4)
        results.append(space["f"](x, x, x).detach())
    before, after = results
    assert before[0].isnan().all()
    assert after[0].isfinite().all()
    assert torch.equal(before[1], after[1])


def test_both_operations_of_a_line_are_changed_together(write: Any) -> None:
    """Where two of a kind stand on the line, the change of both follows those of each."""
    site = write("    return torch.atan(y / x.abs()) - torch.atan(y / z.abs())")
    found = list(texts(site, Facts("div", "float32", False)))
    assert found[2] == (
        "return torch.atan(y / x.abs().clamp(min=1e-8)) - torch.atan(y / z.abs().clamp(min=1e-8))"
    )


def test_the_expression_that_failed_comes_first(write: Any) -> None:
    site = write("    return torch.atan(y / x.abs()) - torch.atan(y / z.abs())")
    start = site.file.text.index("y / z.abs()")
    position = site.file.between(2, start - 16, 2, start - 16 + 11)
    first = next(iter(changes(site, Facts("div", "float32", False), position)))
    assert [one.text for one in first.edits] == ["z.abs().clamp(min=1e-8)"]


def test_the_lines_that_define_the_names_are_known(write: Any) -> None:
    """A name that is assigned twice is defined where it was assigned last."""
    site = write("    w = x + 1\n    w = torch.sqrt(x)\n    a, b = x, y\n    return y / (w + a)")
    assert site.definitions() == [3]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("aten.div.Tensor", "div"),
        ("aten.log_.default", "log"),
        ("aten._softmax.default", "_softmax"),
        ("DivBackward0", "div"),
        ("LogSoftmaxBackward0", "log_softmax"),
        ("Log2Backward0", "log2"),
        ("torch::autograd::CopyBackwards", "copy_backwards"),
    ],
)
def test_names_of_operations(name: str, expected: str) -> None:
    assert operation_name(name) == expected


def test_a_name_that_is_defined_by_itself(write: Any) -> None:
    """The search for what a name means ends."""
    site = write("    x = x + 1\n    return torch.log(x)")
    proposed = list(changes(site, Facts("log", "float32", backward=False)))
    assert "torch.log(x.clamp(min=1e-12))" in edited(site, proposed[0])
