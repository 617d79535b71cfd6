"""A gradient that is not finite, and that no step has taken when the watch ends."""

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from nanwatch import NonFiniteError, Report
from support.examined import comment_of
from support.toys import Does, Root, fault_of
from support.watching import watch

pytestmark = pytest.mark.usefixtures("each_recorder")


def model_at_zero() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), Root())
    nn.init.zeros_(model[0].weight)
    return model


def backward(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("action", ["raise", "warn"])
def test_leaving_says_what_is_held(action: Any, tmp_path: Path) -> None:
    """One warning with the finding, at the `with`; the report has it, and so has output_dir. Once, however often."""
    model = model_at_zero()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with watch(model, gradients=True, on_nonfinite=action, output_dir=tmp_path) as w:
            backward(model)
            assert not torch.isfinite(model[0].weight.grad).all()
    (held,) = [one for one in told if "before a step" in str(one.message)]
    assert "inf first seen in `input[0].grad` of 1 (Root) in the backward of batch 0; " in str(held.message)
    assert held.filename == __file__
    finding = w.report().finding
    assert (finding.module, finding.phase) == ("1", "backward")
    assert "the watch ended before a step took it" in finding.remarks
    assert (tmp_path / "batch-0" / "report.json").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        w.stop()
        with watch(model, gradients=True):  # the user drops the gradients
            backward(model)
            model.zero_grad()


def test_an_exception_of_the_block_stays(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither a warning that a filter makes an error of, nor what a callable raises, takes its place."""

    def refuse(report: Report) -> None:
        raise ValueError("of the callable")

    def fail(model: nn.Module, action: Any) -> None:
        with watch(model, gradients=True, on_nonfinite=action):
            backward(model)
            raise LookupError("mine")

    for action in ("raise", refuse):
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            with pytest.raises(LookupError, match="mine") as caught:
                fail(model_at_zero(), action)
        assert caught.value.__context__ is None
    assert "before a step took it" in capsys.readouterr().err


def test_a_backward_from_an_edge_of_the_graph() -> None:
    with watch(model := nn.Linear(2, 1), gradients=True):
        torch.autograd.backward(torch.autograd.graph.get_gradient_edge(model(torch.ones(1, 2)).sum()))
    assert torch.equal(model.weight.grad, torch.ones(1, 2))


def test_a_skipped_step_is_not_blamed_for_the_next_forward() -> None:
    """The scaler has skipped the step of the bad backward, so a forward that fails then has a cause of its own."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), Does(lambda x: x**3))
    nn.init.ones_(model[0].weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    with watch(model, gradients=True, scaler=scaler) as w:
        scaler.scale(model(torch.ones(1, 2)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        finding = fault_of(model, torch.full((1, 2), 1e20)).finding
    assert (finding.phase, finding.batch, finding.module) == ("forward", 1, "1")
    assert [step.batch for step in w.skipped_steps] == [0]


def test_a_nan_loss_of_finite_gradients_is_raised_by_its_backward() -> None:
    """All labels are ignored: 0 / 0, and gradients of 0. The report has the line that divides, and a cure."""
    torch.manual_seed(0)
    model = nn.Linear(2, 3)
    labels = torch.full((4,), -100)
    with watch(model, gradients=True):
        losses = nn.functional.cross_entropy(model(torch.ones(4, 2)), labels, reduction="sum")
        loss = losses / (labels != -100).sum()  # divides
        with pytest.raises(NonFiniteError) as error:
            loss.backward()
    finding = error.value.report.finding
    assert (finding.module, finding.label, finding.value) == ("(loss)", "output", "nan")
    assert (finding.is_of_loss, finding.operation) == (True, "aten.div.Tensor")
    assert comment_of(finding) == "divides"
    assert finding.cures[0].works
    assert model.weight.grad is not None
    assert torch.isfinite(model.weight.grad).all()


@pytest.mark.parametrize(("dtype", "factor"), [(torch.float32, 1e38), (torch.float16, 1e3)])
def test_an_inf_loss_of_finite_gradients(dtype: torch.dtype, factor: float) -> None:
    """The step is a failure, unless a scale alone may have made it."""
    model = nn.Linear(2, 1)
    with watch(model, gradients=True):
        losses = (model(torch.ones(1, 2)) * 0 + 100).to(dtype) * factor
        losses.mean().backward()  # a step may be left out
        step = torch.optim.SGD(model.parameters(), lr=0.1).step
        assert (step() is None) if dtype is torch.float16 else fault_of(step).finding.value == "inf"
    assert (model.weight.grad == 0).all()


def test_a_nan_loss_behind_a_dead_relu_is_raised_by_the_step() -> None:
    """The ReLU's gradient is nan, and those of the weights are 0. The step of a later batch is not stopped for it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 1), nn.ReLU())
    nn.init.constant_(model[0].bias, -9.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, gradients=True):
        for target in (0.0, 1.0):
            output = model(torch.ones(1, 2))
            loss = ((output - target).abs() / (output.abs() + target)).mean()  # divides
            optimizer.zero_grad()
            loss.backward()
            assert all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
            if target:
                optimizer.step()
                continue
            finding = fault_of(optimizer.step).finding
    assert (finding.module, finding.is_of_loss, finding.operation) == ("1", True, "aten.div.Tensor")


def test_a_nan_loss_of_bad_gradients_waits_for_the_step() -> None:
    """A GradScaler may skip that. A nan at which `autograd.grad` begins is no loss."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with watch(model, gradients=True):
        y = model(torch.ones(1, 2)).sum()
        torch.autograd.grad(y + torch.nan, y, retain_graph=True)
        (y * torch.nan).backward()
        with pytest.raises(NonFiniteError, match=r"`output.grad` of the root module"):
            optimizer.step()


# By default: the gradients of the model's outputs, and of some of its first weights


class Rooted(nn.Module):
    """A root that has an infinite derivative at zero, behind a layer and before another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.last((x - x).abs().sqrt() + x)


def train(model: nn.Module, loss_of: Any, rewrite: Any = id, **options: Any) -> Any:
    """Train until the watch raises; return the report's finding, and whether a step has changed a weight."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    before = [x.clone() for x in model.parameters()]
    trainer = SimpleNamespace(step=loss_of)  # as a program may call what makes its loss
    try:
        with watch(model, **options):
            for _ in range(2):
                loss = trainer.step(model(torch.ones(3, 2)))
                optimizer.zero_grad()
                loss.backward()
                rewrite(model)
                optimizer.step()
    except NonFiniteError as error:
        return error.report.finding, not all(map(torch.equal, before, model.parameters()))
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("every_module", [None, True])
def test_the_loss_and_a_root_are_found_before_a_step(every_module: bool | None) -> None:
    """The line and the module are the same as with the gradients of all modules, and no step has been taken."""
    for model, name in (nn.Linear(2, 1), ""), (nn.Sequential(nn.Linear(2, 1)), "0"):  # whose root is unseen
        options = {"gradients": every_module, "modules": name or "*"}
        finding, is_changed = train(model, lambda x: (x - x).sqrt().mean() + x.sum(), **options)
        assert (finding.module, finding.label, finding.is_of_loss) == (name, "output.grad", True)
        assert (finding.operation, finding.batch, is_changed) == ("SqrtBackward0", 0, False)
    finding, is_changed = train(Rooted(), lambda x: x.square().mean(), gradients=every_module)
    assert (finding.operation, finding.batch, is_changed) == ("SqrtBackward0", 0, False)
    assert "" in (finding.module, finding.source_module)
    finding, is_changed = train(Rooted(), lambda x: x.square().mean(), gradients=False)
    assert (finding.label, finding.batch == 0, is_changed) == ("weight", finding.phase == "step", True)
    with watch(model := Rooted(), gradients=every_module):
        model(torch.ones(3, 2)).square().mean().backward()  # whose graph is gone before the step
        finding = fault_of(torch.optim.SGD(model.parameters()).step).finding
    assert finding.operation == "SqrtBackward0"
    with watch(unit := nn.ParameterList([torch.zeros(2)]), gradients=every_module):  # that nobody calls
        unit[0].sqrt().sum().backward()
        finding = fault_of(torch.optim.SGD(unit.parameters()).step).finding
    assert (finding.label, finding.batch, finding.operation) == ("0.grad", 0, "SqrtBackward0")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_bad_loss_of_finite_gradients_is_found_at_its_step(value: float) -> None:
    """A step that the program leaves out, as it looks at the loss itself, is no failure, and neither is the next."""
    finding, is_changed = train(nn.Linear(2, 1), lambda x: x.sum() + value)
    assert (finding.module, finding.batch, is_changed) == ("(loss)", 0, False)
    optimizer = torch.optim.SGD((model := nn.Linear(2, 1)).parameters(), lr=0.1)
    with watch(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        for bad in (value, 0.0, value, 0.0):
            optimizer.zero_grad()
            loss = (model(torch.ones(3, 2)) * (1 if bad == 0 else bad)).sum() + bad
            loss.backward()
            if loss.isfinite():
                optimizer.step()


def test_a_finite_backward_leaves_nothing() -> None:
    """A gradient that is finite costs no frame; that of a module inside is not looked at."""
    with watch(model := nn.Sequential(nn.Linear(2, 2), nn.ReLU())) as w:
        for _ in range(2):
            backward(model)
        assert [frame.phase for frame in w.frames] == ["forward"] * 6
        model[0].register_full_backward_pre_hook(lambda *_: (torch.full((1, 2), torch.nan),))
        backward(model)
        assert [frame.phase for frame in w.frames] == ["forward"] * 9
