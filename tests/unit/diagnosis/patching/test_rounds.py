"""Changes of the source: what is told works in the file, changes nothing of the model, and is near float64."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanwatch import watch
from nanwatch.diagnosis.patching.proposer import says_count
from nanwatch.report.finding import Cure, Finding
from support.gradient_models import failing_backward
from support.toys import Does, fault_of

INF = float("inf")
HEALTHY_AND_ZERO = torch.tensor([[1.5, 2.0, 3.0], [0.0, 0.0, 0.0]])


class Ratio(nn.Module):
    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        x = nn.functional.dropout(x, 0.5) * 0 + x
        return self.scale * x / x.sum(-1, keepdim=True)


def failed(model: nn.Module, *args: Tensor, **options: Any) -> Finding:
    with watch(model, **options):
        return fault_of(model, *args).finding


def works(finding: Finding) -> Cure:
    assert finding.cures, finding.remarks
    assert finding.cures[0].works
    return finding.cures[0]


def new_lines(cure: Cure) -> list[str]:
    return [line[1:].strip() for line in cure.patch.splitlines() if re.match(r"\+(?!\+)", line)]


def test_the_cure_is_the_line_and_says_how_near_float64_it_is() -> None:
    """Healthy negative values forbid a clamp, which would change them: the divisor is replaced where it is small."""
    cure = works(failed(Ratio(), HEALTHY_AND_ZERO))
    assert new_lines(cure) == ["return self.scale * x / x.sum(-1, keepdim=True).clamp(min=1e-8)"]
    assert cure.effect.startswith("agrees with float64, to 2.5e-08 of the largest value; as it is, it fails")
    assert ("test_rounds.py" in cure.patch, cure.code) == (True, "")

    cure = works(failed(Ratio(), torch.cat([HEALTHY_AND_ZERO, -HEALTHY_AND_ZERO])))
    divisor = "x.sum(-1, keepdim=True)"
    (line,) = new_lines(cure)
    assert line == f"return self.scale * x / torch.where({divisor}.abs() < 1e-8, 1e-8, {divisor})"


# ruff: noqa: E731 - a trial finds functions that a module names
squashed = lambda x: (1 - (2 * torch.tanh(x)) ** 2).log()
angle = lambda x: torch.acos((x * x).sum(-1, keepdim=True))
hyperbolic = lambda x: torch.acosh(1 + 2 * x * x / (1 - x * x))
deviation = lambda x: 1 / (x - 1) ** 0.5
fractional = lambda x: (x - 1) ** 0.3
shifted = lambda x: torch.log(1 + (x - 4))
stretched = lambda x: (x - 1) ** 1.5
OUTSIDE = squashed, angle, hyperbolic, deviation, fractional, shifted
OPERANDS = "-2.96", "9.01", "-1.25", "-0.9", "-0.9", "-2.9"


@pytest.mark.parametrize(("function", "operand"), [*zip(OUTSIDE, OPERANDS, strict=True)])
def test_a_guard_far_outside_a_domain_is_no_cure(function: Callable[[Tensor], Tensor], operand: str) -> None:
    """A clamp would hide what made the operand."""
    finding = failed(Does(function), torch.tensor([0.1, 3.0]))
    assert not finding.cures
    assert f"float64 too has {operand} there" in " ".join(finding.remarks)


def test_a_power_of_a_negative_value_gets_a_guard_that_is_told_as_one() -> None:
    cure = works(failed(Does(stretched), torch.tensor([0.1, 3.0])))
    assert "a guard: it moves -0.9, which float64 has there too" in cure.effect


def unit(x: Tensor, eps: float = 1e-8) -> Tensor:
    """Divide by a norm and an eps that float16 rounds to 0."""
    length = x.norm(dim=-1, keepdim=True) + eps
    return x / length


def test_an_eps_that_the_format_rounds_to_zero_is_the_cause_and_made_larger() -> None:
    finding = failed(Does(unit), HEALTHY_AND_ZERO.half())
    assert new_lines(works(finding)) == ["length = x.norm(dim=-1, keepdim=True) + max(eps, 1e-4)"]
    assert any("`eps` is 0 in float16" in remark for remark in finding.remarks)


adversarial = lambda p, q: torch.log(p) + torch.log(1 - q) + torch.log(q + 1e-6)
saturated = lambda p, q: torch.log(torch.sigmoid(p)) + torch.log(1 - torch.sigmoid(q))


def turned(x: Tensor) -> Tensor:
    angle = x.norm(dim=-1, keepdim=True)
    return x / angle * angle.sin()


def correlated(x: Tensor) -> Tensor:
    c = 1 - x**2
    return 1e5 / (2 * c) + torch.log(c)


def focal(x: Tensor) -> Tensor:
    p, labels = F.softmax(x, dim=1), torch.tensor([1])
    pt = p.gather(1, labels[:, None]).squeeze(1)
    return (1 - pt) ** 2 * torch.log(pt)


def deep(x: Tensor) -> Tensor:
    for _ in range(4):
        scale = x.abs()
        x = x * torch.exp(scale) + scale
    return x


def standardised(a: Tensor, b: Tensor) -> Tensor:
    a = (a - a.mean(0)) / a.std(0)
    b = (b - b.mean(0)) / b.std(0)
    return a.T @ b


@pytest.mark.parametrize(
    ("function", "values", "line"),
    [
        (standardised, [[[1.0], [1.0]], [[1.0], [2.0]]], "b = (b - b.mean(0)) / b.std(0).clamp(min=1e-8)"),
        (
            adversarial,
            [0.5, 1.0],
            "torch.log(p.clamp(min=1e-12)) + torch.log((1 - q).clamp(min=1e-12)) + torch.log(q + 1e-6)",
        ),
        (saturated, [0.5, 99.0], "F.logsigmoid(p) + F.logsigmoid(-q)"),
        (turned, [[0.0, 0.0]], "angle = x.norm(dim=-1, keepdim=True).clamp(min=1e-8)"),
        (correlated, [1.0], "c = (1 - x**2).clamp(min=1e-3)"),
        (focal, [[[120.0, -120.0]]], "F.log_softmax(x, dim=1).gather(1, labels[:, None]).squeeze(1)"),
        (deep, [[120.0]], "scale = x.abs().clamp(max=2)"),
    ],
)
def test_a_cure_is_for_all_operations_that_would_fail_of_the_same_value(
    function: Any, values: list[Any], line: str
) -> None:
    """Others of its kind fail in another batch, and all uses of a name see one value: at 0 a turn has its gradient.

    A cure leaves what the program guards. It does not work if the result is 5e12 and float64 fails. A name is followed
    to what picks from a softmax, and a bound is small enough for what follows it.
    """
    *_, new = new_lines(works(failed(Does(function), *map(torch.tensor, values))))
    assert new.endswith(line)


def contrasted(x: Tensor) -> Tensor:
    similarity = torch.exp(x)
    positive, total = similarity[0], similarity.sum()
    return torch.log(positive / total)


def test_the_exponent_of_what_a_logarithm_takes_gets_no_bound() -> None:
    """It would hand the bound on in place of the exponent, without a gradient."""
    finding = failed(Does(contrasted), torch.tensor([2000.0, 1000.0]))
    assert (finding.operation, finding.cures) == ("aten.exp.default", ())


def decay(x: Tensor) -> Tensor:
    """Take an exponent that is 0 in float64, and far above 80 by the rounding of float32."""
    a = -1.7e7 * F.softplus(x)
    w = torch.exp(a.sum(1, keepdim=True) - a.cumsum(1))
    return (w * x).sum(1)


def test_what_float64_contradicts_does_not_work_and_is_told() -> None:
    torch.manual_seed(0)
    finding = failed(Does(decay), torch.randn(4, 256, 8))
    assert not any(cure.works for cure in finding.cures)
    assert "the batch is finite, but the result is" in " ".join(finding.remarks)


def bounded(linear: nn.Module, x: Tensor) -> Tensor:
    """Take an exponent of 85 to 95, clamped behind the exponential."""
    gap = linear(x)
    k = gap.exp() - gap - 1
    return k.clamp(-10, 10)


def test_a_statement_in_between_may_move() -> None:
    """The exponent is bound for all its uses, and judged at the results: the clamp behind takes what changes."""
    linear = nn.Linear(1, 1, bias=False)
    nn.init.ones_(linear.weight)
    cure = works(failing_backward(Does(bounded, linear), torch.tensor([[1.0], [85.0], [95.0]])).finding)
    assert new_lines(cure) == ["gap = linear(x).clamp(max=20)"]
    assert "2 of 3 elements of that expression are not those of float64" in cure.effect


def test_several_stable_forms_and_an_operand_on_two_lines_with_a_new_name_are_one_cure() -> None:
    torch.manual_seed(0)
    net, x = nn.Linear(3, 2), 20 * torch.randn(9, 3)
    with watch(net, gradients=True):
        variance = torch.exp(
            net(x) ** 2  # a comment keeps the lines apart
            + 0.0,
        )
        (torch.log(variance) + 3 / variance).mean().backward()
        finding = fault_of(torch.optim.Adam(net.parameters()).step).finding
    cure = works(finding)
    assert cure.effect.startswith("agrees with float64")
    assert new_lines(cure)[0] == "logits := net(x) ** 2  # a comment keeps the lines apart"
    assert new_lines(cure)[-1] == "(logits + (3 * torch.exp(-logits))).mean().backward()"


def likelihood(output: Tensor, bound: float = math.inf) -> Tensor:
    mean, log_variance = output.unbind(1)
    return (mean**2 / log_variance.clamp(-bound, bound).exp()).mean()


def unlikely(weight: Tensor) -> nn.Module:
    head = nn.Linear(1, 2)
    head.weight.data, head.bias.data = weight.view(2, 1), torch.tensor([1.0, -110.0])
    weight[:] = torch.tensor([0.0, 0.5])
    return head


@pytest.mark.parametrize(("kind", "rate", "bound"), [("Adam", 1e-3, 20), ("SGD", 1e-4, 5), ("SGD", 1.0, 0)])
def test_a_guard_with_which_the_steps_of_the_training_explode_does_not_work(
    kind: str, rate: float, bound: float, tmp_path: Path
) -> None:
    """A plain training with the bound of the cure is the judge: a variance of e^-110 is 0 in float32.

    The trials change no file that is mapped, as a forked process would.
    """
    saved = torch.from_numpy(np.memmap(tmp_path / "weights", np.float32, "w+", shape=2))

    def farthest(bound: float) -> float:
        head = unlikely(saved)
        optimizer = getattr(torch.optim, kind)(head.parameters(), rate)
        with watch(head, gradients=True) if math.isinf(bound) else nullcontext():
            for _ in range(20):
                optimizer.zero_grad()
                likelihood(head(torch.ones(8, 1)), bound).backward()
                optimizer.step()
        return max(float(weight.data.abs().max()) for weight in head.parameters())

    finding = fault_of(farthest, math.inf).finding
    assert saved.tolist() == [0.0, 0.5]
    if bound:
        (line,) = new_lines(works(finding))
        assert f".clamp(-{bound}, {bound}).exp()" in line
        assert farthest(bound) < 200
    else:
        assert not finding.cures
        assert "3 steps of SGD then move the weights by" in " ".join(finding.remarks)
        assert not farthest(5) < 1e30


def test_infinities_that_are_meant_lose_no_cure() -> None:
    """`allow` says so for the watch, and so for the trials."""
    model = Does(lambda infinite, ratio, x: (infinite(x), ratio(x))[1], Does(lambda x: x + INF), Ratio())
    assert works(failed(model, HEALTHY_AND_ZERO, allow="inf:parts.0"))


def beneath(inner: nn.Module, x: Tensor) -> Tensor:
    """Keep a loss in an attribute."""
    logits = inner(x)
    inner.penalty = torch.log(torch.exp(logits).sum(-1)).sum()
    return logits.tanh()


def test_a_value_in_an_attribute_is_found_and_its_cure_proven() -> None:
    """No output and no gradient of one shows the value, so the changed expression itself has to be finite."""
    model = Does(beneath, inner := nn.Linear(3, 3, bias=False))
    nn.init.eye_(inner.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, gradients=True):
        (model(HEALTHY_AND_ZERO * 100).sum() + inner.penalty).backward()
        finding = fault_of(optimizer.step).finding
    assert finding.operation == "aten.exp.default"
    assert new_lines(works(finding)) == ["inner.penalty = torch.logsumexp(logits, -1).sum()"]


rates = lambda y, scale: torch.distributions.Beta(scale + 1, scale + 1).log_prob(y)
amounts = lambda y, scale: torch.distributions.Gamma(scale + 1, 1.0).log_prob(y)


@pytest.mark.parametrize(
    ("function", "y", "part"),
    [
        (rates, [0.0, 0.3], "y.clamp(min=1e-6)"),
        (rates, [1.0, 0.3], "y.clamp(1e-6, 1 - 1e-6)"),
        (amounts, [0.0, 7.0], "y.clamp(min=1e-6)"),
    ],
)
def test_a_value_at_the_edge_of_a_distribution(function: Any, y: list[float], part: str) -> None:
    """The density is 0 there, and the line has none but the call. What is beyond it is wrong data, and no edge."""
    (line,) = new_lines(works(failed(Does(function), torch.tensor(y), torch.ones(1))))
    assert f"log_prob({part})" in line
    unchecked = lambda y, scale: torch.distributions.Beta(scale + 1, 2.0, validate_args=False).log_prob(y)
    assert not failed(Does(unchecked), torch.tensor([1.5 if y[0] else -0.5, 0.3]), torch.ones(1)).cures


def test_whole_words_say_that_a_value_counts() -> None:
    """A zero of anything else is no empty batch: 1 in its place would be another number."""
    assert all(map(says_count, ["num_tokens", "nValid", "mask.sum()", "(labels != -100).sum()", "lens"]))
    assert not any(map(says_count, ["numerator", "discount", "resized", "x.std(0)"]))


labelled = lambda criterion, x, labels: criterion(x, labels)
by_keyword = lambda x, labels: F.cross_entropy(target=labels, input=x, reduction="mean")
weighted = lambda x, labels: F.cross_entropy(x, labels, weight=torch.tensor([0.0, 1.0, 1.0]))
padded = lambda attend, x, pad: attend(x, x, x, key_padding_mask=pad, attn_mask=None)


def test_a_call_of_a_local_name_is_changed_at_its_labels_and_at_the_mask_that_is_one() -> None:
    model = Does(labelled, nn.CrossEntropyLoss()), Does(padded, nn.MultiheadAttention(2, 1, batch_first=True))
    (line,) = new_lines(works(failed(model[0], torch.ones(2, 3), torch.tensor([-100, -100]))))
    assert line.endswith(": criterion(x, labels) if (labels != -100).any() else x.sum() * 0.0")
    (line,) = new_lines(works(failed(Does(by_keyword), torch.ones(2, 3), torch.tensor([-100, -100]))))
    assert line.endswith('reduction="mean") if (labels != -100).any() else x.sum() * 0.0')
    (line,) = new_lines(works(failed(Does(weighted), torch.ones(2, 3), torch.tensor([0, 0]))))
    assert "[labels[(labels >= 0) & (labels < len(torch.tensor([0.0, 1.0, 1.0])))]].any()" in line
    (line,) = new_lines(works(failed(model[1], torch.ones(1, 3, 2), torch.ones(1, 3, dtype=torch.bool))))
    assert "key_padding_mask=pad & ~pad.all(-1, keepdim=True), attn_mask=None" in line


tenth = lambda x: torch.log10(input=x)
chosen = lambda x: torch.log(torch.gather(input=torch.softmax(x * -99, dim=1), dim=1, index=x.long() // 3))
quotient = lambda x: torch.div(x + 1, other=x.sum(1) - 2)
integral = lambda x: x.new_zeros(2) / (x.long() * 0).sum(0)
squared = lambda x: (x.half() * 300).pow(2).sum().float()
banned = lambda x: (x.half() + (x >= 0).half() * -1e9).softmax(-1).float()
narrow = lambda x: torch.log1p(-(x.bfloat16() / 3).clamp(max=1.0 - 1e-6)).float()
of_wrong_sign = lambda x: x.masked_fill(torch.eye(2, dtype=torch.bool), INF).softmax(-1)


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (tenth, "torch.log10(input=x.clamp(min=1e-12))"),
        (chosen, "torch.gather(input=F.log_softmax(x * -99, dim=1), dim=1, index=x.long() // 3)"),
        (quotient, "torch.div(x + 1, other=torch.where((x.sum(1) - 2).abs() < 1e-8, 1e-8, x.sum(1) - 2))"),
        (integral, "x.new_zeros(2) / (x.long() * 0).sum(0).clamp(min=1)"),
        (squared, "(x.half() * 300).float().pow(2).sum().float()"),
        (banned, "(x.half() + (x >= 0).half() * -3e4).softmax(-1).float()"),
        (narrow, "torch.log1p(-(x.bfloat16() / 3).float().clamp(max=1.0 - 1e-6)).float()"),
        (of_wrong_sign, "x.masked_fill(torch.eye(2, dtype=torch.bool), -1e30).softmax(-1)"),
    ],
)
def test_a_row_for_a_like_function_and_a_mask(function: Callable[[Tensor], Tensor], line: str) -> None:
    """A divisor of integers counts by any name. What the format cannot hold is made smaller, or the format wider."""
    (new,) = new_lines(works(failed(Does(function), torch.tensor([[0.0, 2.0], [3.0, 0.0]]))))
    assert new.endswith(f" = lambda x: {line}")


def piecewise(net: nn.Module, x: Tensor) -> Tensor:
    scale, y = 1.0, net(x)
    root = scale / torch.sqrt(y - 100)
    doubled, mask = 2 * root, y > 101
    return torch.where(mask, doubled, y)


def test_a_name_is_followed_to_the_where_that_takes_it() -> None:
    net = nn.Linear(2, 2)
    nn.init.eye_(net.weight)
    finding = failing_backward(Does(piecewise, net), torch.tensor([[120.0, 9.0]])).finding
    assert new_lines(works(finding)) == ["root = scale / torch.sqrt(torch.where(y > 101, y - 100, 1.0))"]


small = lambda size, eps: torch.log(size + eps) + torch.log(2 - size + eps)


def test_an_eps_is_larger_in_the_whole_function_and_in_float64() -> None:
    """Float64 has the old eps, whose logarithm is another. It tells of all values that the new one moves."""
    cures = [
        failed(Does(lambda x: small(x, 1e-8)), torch.tensor([0.0, value]).half()).cures
        for value in (0.5, 1e-3)
    ]
    (line,) = new_lines(cures[0][0])
    assert line.endswith("torch.log(size + max(eps, 1e-4)) + torch.log(2 - size + max(eps, 1e-4))")
    assert "beside the same in float64 it agrees with float64" in cures[0][0].effect
    assert not any("beside the same" in cure.effect for cure in cures[1])


@pytest.mark.parametrize(
    ("x", "decay", "remark"),
    [
        ([9.0, 9.0], 0.0, "all its gradients are 0"),
        ([9.0, 9.0], 0.1, "the guard makes all elements the same"),
        ([9.0, 0.1], 0.0, ""),
    ],
)
def test_a_guard_without_a_gradient_is_no_cure(x: list[float], decay: float, remark: str) -> None:
    """A loss that is the same whatever the weights are trains nothing, or what is beside it alone."""
    net = nn.Sequential(nn.Linear(1, 1), Does(lambda x: torch.exp(-100 * x**2)))
    nn.init.ones_(net[0].weight)
    nn.init.zeros_(net[0].bias)
    with watch(net, gradients=True):
        (decay * net[0].weight.sum() - torch.log(net(torch.tensor(x)[:, None])).mean()).backward()
        finding = fault_of(torch.optim.SGD(net.parameters(), 0.1).step).finding
    assert bool(finding.cures) == (not remark)
    assert remark in " ".join(finding.remarks)


def test_an_angle_of_equal_vectors_needs_no_gradient() -> None:
    """The arc cosine is finite at the end of its domain, where a clamp stops the gradient."""
    net = nn.Sequential(nn.Linear(1, 1, bias=False), Does(lambda cosine: torch.acos(cosine)))
    nn.init.ones_(net[0].weight)
    with watch(net):
        finding = fault_of(lambda: net(torch.tensor([[1.0000001]])).mean().backward()).finding
    assert "`cosine.clamp(-1 + 1e-6, 1 - 1e-6)`" in works(finding).what
