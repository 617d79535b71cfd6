"""Cures by other formats: what works, applied as a user would, ends the failure, and what does not help does not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nanwatch
from nanwatch.diagnosis import experiment
from nanwatch.diagnosis.batch_snapshot import BatchSnapshot
from nanwatch.diagnosis.cures import code_of, try_formats
from nanwatch.diagnosis.experiment import Trials, compared
from nanwatch.diagnosis.formats import Draws, Float64
from nanwatch.diagnosis.isolation import can_fork
from nanwatch.report.finding import Finding, working_first
from programs.case import Setup, follow
from support.examined import snapshot_of
from support.toys import Does, fault_of

HALF = torch.float16


def linear(value: float, size: int = 4) -> nn.Linear:
    """A layer with all weights `value` and no bias."""
    layer = nn.Linear(size, size, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


def big(value: float) -> Tensor:
    return torch.full((1, 3, 4), value)


def failed(
    model: nn.Module, x: Tensor, *, autocast: torch.dtype | None = None, grad: bool = False
) -> tuple[BatchSnapshot, Finding]:
    """Return the start of the batch and the finding of the failing call, without what a re-run may have found."""
    around = nullcontext() if autocast is None else torch.autocast("cpu", autocast)
    with around, nanwatch.watch(model), torch.set_grad_enabled(grad):
        start = snapshot_of(model, (x,), {})
        finding = fault_of(model, x).finding
    assert finding is not None
    return start, replace(finding, transient=None, operands=(), cures=(), remarks=())


def formats_of(start: BatchSnapshot, finding: Finding, model: nn.Module) -> Any:
    tried = Trials(start, finding, model)
    try_formats(tried)
    return working_first(tried.cures), tuple(tried.remarks)


def is_finite(model: nn.Module, x: Tensor, autocast: torch.dtype | None, what: str) -> bool:
    """Return whether all of the forward is finite with the cure that `what` names, applied to a copy of the model."""
    setup = Setup(copy.deepcopy(model), (x,), autocast=autocast)
    assert follow(what, setup)
    try:
        with nanwatch.watch(setup.model), torch.no_grad():
            setup.run()
    except nanwatch.NonFiniteError:
        return False
    return True


# For each the model, its input, the dtype of autocast or None for half weights, and the cures in their order of trial,
# each by the start of its text and whether it works.
CASES: dict[str, tuple[Callable[[], nn.Module], Any, torch.dtype | None, list[tuple[str, bool]]]] = {
    "a leaf whose result does not fit, under autocast": (
        lambda: nn.Sequential(linear(100), linear(100), Does(torch.tanh), linear(1)),
        big(100.0),
        HALF,
        [("run `1` in float32", False), ("use bfloat16 in autocast", True)],
    ),
    "an ancestor is enough, with half weights": (
        lambda: nn.Sequential(
            linear(1), nn.Sequential(nn.Sequential(linear(300), Does(torch.relu)), linear(1e-4)), linear(1)
        ).half(),
        big(100.0).half(),
        None,
        [
            ("run `1.0.0` in float32", False),
            ("load the weights in bfloat16", True),
            ("run `1` in float32, nanwatch.run_in_fp32(model[1])", True),
        ],
    ),
    "half precision written into the code": (
        lambda: nn.Sequential(linear(1), Does(lambda x: (x.half() * x.half()).float())),
        big(500.0),
        HALF,
        [("run `1` in float32", False)],
    ),
}


@pytest.mark.parametrize(("build", "x", "autocast", "expected"), CASES.values(), ids=CASES)
def test_the_cures_are_true(
    build: Callable[[], nn.Module], x: Tensor, autocast: torch.dtype | None, expected: list[tuple[str, bool]]
) -> None:
    """Each cure is what it says it is when a user applies it, and the cures are those expected, in few runs."""
    torch.manual_seed(0)
    model = build()
    start, finding = failed(model, x, autocast=autocast)
    with mock.patch.object(experiment, "run", wraps=experiment.run) as runs:
        cures, remarks = formats_of(start, finding, model)
    assert runs.call_count <= 7
    assert not remarks
    expected = sorted(expected, key=lambda case: not case[1])
    for cure, (begin, works) in zip(cures, expected, strict=True):
        assert cure.what.startswith(begin)
        assert cure.works is works
        assert is_finite(model, x, autocast, cure.what) is works
    assert not is_finite(model, x, autocast, "clamp the input of `0` to ±inf")


def test_the_whole_model_is_tried_whatever_lies_around_the_guilty_module() -> None:
    """The three modules around the overflow hand it on, and bfloat16 loses the differences that the norm enlarges."""
    torch.manual_seed(0)
    layer = linear(300)
    with torch.no_grad():
        layer.weight += torch.randn(4, 4)
    around = nn.Sequential(nn.Sequential(nn.Sequential(layer)))
    model = nn.Sequential(around, nn.LayerNorm(4)).half()
    start, finding = failed(model, big(100.0).half())
    cures, (remark, _) = formats_of(start, finding, model)
    works = [(cure.what.partition(" in ")[0], cure.works) for cure in cures]
    assert works == [("run the model", True), ("run `0.0.0.0`", False)]
    assert "bfloat16" in remark


def test_the_code_that_names_a_module_is_python() -> None:
    """Also where a key of a ModuleDict is a keyword, or no name."""
    parts = {key: nn.Sequential(nn.Linear(1, 1)) for key in ("in", "two words", "plain")}
    model = nn.ModuleDict(parts)
    assert all(eval(code_of(model, f"{key}.0")) is part[0] for key, part in parts.items())


def test_a_cure_that_leaves_less_than_a_bit_is_not_enough() -> None:
    """The result is 40,000, and the next batch, of twice the values, would overflow again."""
    model = nn.Sequential(linear(1), Does(lambda x: x * x / 4)).half()
    cures, _ = formats_of(*failed(model, big(100.0).half()), model)
    assert [cure.verdict for cure in cures] == ["works", "not enough"]


def test_trials_forgive_bad_data_alone_and_measure_by_the_first_run_in_float64() -> None:
    """A value made inside the batch has to be finite, even if the outputs are, and outputs have to be in any case.

    Later runs in float64 have the changes of earlier rounds.
    """
    for part, forgiving in (torch.reciprocal, {"data", "buffer"}), (torch.neg, set()):
        model = Does(lambda part, x: part(x / 0), Does(part))
        start, finding = failed(model, torch.ones(2))
        for origin in ("received", "data", "buffer"):
            tried = Trials(start, replace(finding, origin=origin), model)
            assert [tried.in_float64() is tried.exact for _ in range(2)] == [True, False]
            assert tried.judge(tried.run())[0] is (origin in forgiving)


def test_no_float32_for_what_is_float32() -> None:
    """Where no narrow format takes part there is no cure, and but one run."""
    model = nn.Sequential(linear(1), Does(torch.exp))
    start, finding = failed(model, big(1000.0))
    with mock.patch.object(experiment, "run", wraps=experiment.run) as runs:
        assert formats_of(start, finding, model) == ((), ())
    assert runs.call_count == 1


def test_a_cure_whose_gradients_overflow_does_not_help() -> None:
    """The outputs are finite in float32; the gradients of the float16 weights are not, of which bfloat16 has room.

    They are those of a loss that grows with the square of the outputs.
    """
    model = Does(lambda up, down, x: down(up(x).square()), linear(200), linear(1e-3)).half()
    x = torch.full((2, 4), 8.0, dtype=HALF)
    start, finding = failed(model, x, grad=True)
    verdicts = {cure.what.partition(",")[0]: cure.works for cure in formats_of(start, finding, model)[0]}
    assert verdicts == {"load the weights in bfloat16": True, "run the model in float32": False}
    for hold, dtype, is_right in (
        (nanwatch.run_in_fp32(model), HALF, False),
        (nullcontext(), torch.bfloat16, True),
    ):
        model.to(dtype).zero_grad()
        with hold:
            model(x.to(dtype)).float().square().mean().backward()
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters()) == is_right


def test_the_backward_of_a_trial_runs_behind_autocast() -> None:
    """As that of the user does: the best cure is the same with gradients as without.

    The backward of `unbind` stacks, which autocast refuses for bfloat16 inside a float16 block.
    """
    torch.manual_seed(0)
    unbound = lambda a, b, x: b(torch.cat(a(x).view(-1, 2, 4).unbind(1), -1))  # noqa: E731
    model, x = Does(unbound, nn.Linear(8, 8), nn.Linear(8, 8)), torch.randn(4, 8)
    with torch.no_grad():
        model.parts[1].weight.mul_(1e5)  # type: ignore[operator]
    cures = []
    for gradients in (False, True):
        autocast = torch.autocast("cpu", dtype=torch.float16)
        raised = pytest.raises(nanwatch.NonFiniteError)
        with nanwatch.watch(model, gradients=gradients), autocast, raised as error:
            model(x)
        cures.append(error.value.report.finding.cures)
    assert cures[0] == cures[1]
    assert cures[0][0].what == 'use bfloat16 in autocast, torch.autocast("cpu", dtype=torch.bfloat16)'


class Stateful(nn.Module):
    """Dropout, running statistics, half and single precision, a flag that a forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.attention = Does(lambda project, x: (project(x) @ project(x).mT).softmax(-1), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Any:
        self.drop.training = not self.drop.training
        y = self.drop(self.norm(x)) * 0 + x
        return self.attention(y[None])


def dicts_of(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {key: dict(value) if isinstance(value, dict) else value for key, value in module.__dict__.items()}
        for module in model.modules()
    ]


@pytest.mark.parametrize("is_half", [False, True])
def test_the_model_is_left_as_it_was(is_half: bool) -> None:
    """Parameters, buffers, flags, hooks, gradients, random states and every module's __dict__ are as before."""
    torch.manual_seed(0)
    model = nn.Sequential(linear(1), Stateful())
    x = torch.full((3, 4), 2000.0)
    if is_half:
        model, x = model.half(), x.half()
    hook = model[1].register_forward_hook(lambda *_: None)
    start, finding = failed(model, x, autocast=None if is_half else HALF)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    objects, dicts = [*model.parameters(), *model.buffers()], dicts_of(model)
    random_state = torch.get_rng_state()
    cures, remarks = formats_of(start, finding, model)
    assert any(cure.works for cure in cures)
    assert remarks == ()
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(a is b for a, b in zip(objects, [*model.parameters(), *model.buffers()], strict=True))
    assert all(parameter.grad is None for parameter in model.parameters())
    assert dicts == dicts_of(model)
    assert hook.id in model[1]._forward_hooks
    assert not torch.is_autocast_enabled("cpu")


def test_a_trial_that_raises_is_a_remark() -> None:
    """A module that cannot take float32 or bfloat16 is reported so, one line for each trial, and nothing is raised."""

    def only_half(x: Tensor) -> Tensor:
        if x.dtype is not HALF:
            raise RuntimeError("float16 only\nand a second line")
        return x * x

    model = nn.Sequential(linear(1), Does(only_half)).half()
    x = big(1000.0).half()
    start, finding = failed(model, x)
    cures, remarks = formats_of(start, replace(finding, transient=False), model)
    assert [cure.what for cure in cures] == ["clamp the output of `1` to ±65504"]
    assert is_finite(model, x, None, cures[0].what)
    assert remarks
    assert all(remark.endswith("RuntimeError: float16 only") for remark in remarks)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.empty_like(x).normal_(),
        lambda x: torch.bernoulli(x.sigmoid()),
        lambda x: nn.init.trunc_normal_(torch.empty_like(x)),
        lambda x: torch.multinomial(x.softmax(-1), 2),
        lambda x: F.dropout(torch.ones_like(x)),
        lambda x: torch.native_dropout(x, 0.5, True)[0],  # dropout on a GPU
        lambda x: torch.normal(0.0, x.abs()),
        lambda x: torch.randn(4, 5, dtype=x.dtype.to_complex()),
        lambda x: torch.distributions.Exponential(x.exp()).rsample(),
        lambda x: (filled := x.clone(), torch.rand(4, 5, out=filled))[0],
        lambda x: torch.randn_like(x).double(),
    ],
)
def test_float64_draws_the_random_numbers_of_the_batch(draw: Callable[[Tensor], Tensor]) -> None:
    x, formats = torch.linspace(-1, 1, 20).view(4, 5), list[Any]()
    torch.manual_seed(0)
    with Draws(formats):
        expected = draw(x)
    torch.manual_seed(0)
    with Float64(), Draws(formats):
        wide = draw(x)
    assert wide.dtype in (torch.int64, torch.float64, torch.complex128)
    torch.testing.assert_close(wide, expected.to(wide.dtype), atol=1e-6, rtol=1e-6)


def test_a_batch_in_float64_is_tried_with_its_own_random_numbers() -> None:
    """Of this seed it takes the root of -0.93, and float32 that of 1.55."""
    torch.manual_seed(19)
    model, x = Does(lambda x: torch.sqrt(torch.randn_like(x)[0, 0]) + x), torch.ones(8, 8).double()
    with nanwatch.watch(model), pytest.raises(nanwatch.NonFiniteError, match=r"float64 too has -0\.931"):
        model(x)


def test_a_result_in_8_bits_may_differ_by_their_rounding() -> None:
    exact = torch.randn(64, dtype=torch.float64)
    assert compared([exact.to(torch.float8_e4m3fn)], [exact])[0]
    assert not compared([(1.1 * exact).to(torch.float8_e4m3fn)], [exact])[0]


@pytest.mark.parametrize(
    ("values", "exact", "is_close", "words"),
    [
        ([[0.002]], [[0.0]], True, "moves the result by 2.0e-03"),  # by a guard
        ([[0.005]], [[0.0]], False, "the result is 0.005 away"),
        ([[1.0, torch.inf]], [[1.0, 1e51]], True, "agrees with float64"),  # past the end of float32
        ([[torch.nan]], [[1.0]], False, "the result is inf away"),
        ([[1.0, 2e19]], [[1.0, torch.inf]], False, "the result is 2e+19 where float64 fails"),
        ([[1.0, 1e19, -1e30]], [[1.0, torch.inf, torch.nan]], True, "agrees with float64"),
        ([[1.0, 2.0]], [[[1.0, 2.0]]], True, "not compared"),
        ([[1.0], [1.0]], [[torch.nan], [1.0]], True, "as it is, it fails in float64 too"),
        ([[1.0], [1.0]], [[1e51], [1.0]], True, "float64 gives more than float32 holds"),
        ([[1.0], [1.0], [0.002]], [[torch.nan], [1.0], [0.0]], True, "moves the result by 2.0e-03"),
    ],
)
def test_results_compared_if_float64_is_finite(values: Any, exact: Any, is_close: bool, words: str) -> None:
    wide = [torch.tensor(x, dtype=torch.float64) for x in exact]
    result, effect = compared([torch.tensor(x) for x in values], wide)
    assert (result, effect.startswith(words)) == (is_close, True), effect
    assert experiment._moved([torch.ones(2)], [torch.ones(3)]) == (0.0, False, "")


@pytest.mark.skipif(not can_fork(), reason="steps are taken in a child process alone")
@pytest.mark.parametrize("diverges", [True, False])
def test_a_learning_rate_that_diverges_gets_a_lower_one(diverges: bool) -> None:
    """Gradient descent on a quadratic converges below 2 over the largest eigenvalue of its Hessian, and not above."""
    torch.manual_seed(0)
    x, model = torch.linspace(0, 100, 32).unsqueeze(1), nn.Linear(1, 1)
    ones = torch.cat([x, torch.ones_like(x)], 1)
    most = 2 / float(torch.linalg.eigvalsh(2 * ones.T @ ones / len(x))[-1])
    optimizer = torch.optim.SGD(model.parameters(), lr=20 * most if diverges else 0.5 * most)

    def step(number: int) -> None:
        loss = F.mse_loss(model(x), 3 * x + 7)
        if not diverges and number == 30:
            model.weight.data.fill_(1e30)  # a weight that grew without a learning rate
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with nanwatch.watch(model), pytest.raises(nanwatch.NonFiniteError) as raised:
        any(map(step, range(100)))
    words = [x.what.split() for x in raised.value.report.finding.cures]  # type: ignore[union-attr]
    rates = [float(x[5].strip(",")) for x in words if "rate" in x]
    assert len(rates) == diverges
    assert all(most / 10 < rate < most for rate in rates)


@pytest.mark.skipif(not can_fork(), reason="steps are taken in a child process alone")
def test_weights_that_are_larger_than_their_module_makes_them() -> None:
    layers = [nn.Linear(64, 64) for _ in range(40)]
    for layer in layers[:-1]:
        nn.init.normal_(layer.weight, std=2.0)
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        F.mse_loss(model(torch.ones(2, 64)), torch.ones(2, 64)).backward()
        optimizer.step()

    with nanwatch.watch(model), pytest.raises(nanwatch.NonFiniteError) as raised:
        step()
    (cure,) = raised.value.report.finding.cures  # type: ignore[union-attr]
    assert " and 38 others smaller: up to 0.12, as its module does" in cure.what
