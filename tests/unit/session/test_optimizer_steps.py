"""The look before an optimizer's step: what is raised, what was skipped, what passes, and what a step leaves behind."""

import copy
import gc
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.report.report import NonFiniteError, Report
from nanwatch.session.watch import Watch
from support.gradient_models import Narrow, Sick
from support.recorders import WITH_DEVICE, needs_native, watched
from support.toys import Does, fault_of, finding_of
from support.training import assert_same_bits
from support.watching import watch

# Each recorder, and each way in which an optimizer computes.
WAYS = pytest.mark.parametrize(
    ("recorder", "kind"),
    [
        ("python", {}),
        pytest.param("native", {"foreach": True}, marks=needs_native),
        pytest.param("native", {"fused": True}, marks=needs_native),
        pytest.param("device", {}, marks=needs_native),
    ],
)


def train(model: nn.Module, scaler: Any, steps: int, kind: dict[str, Any]) -> Iterator[int]:
    """So many steps with a GradScaler; the number of each, once it is made."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **kind)
    for step in range(steps):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        yield step


@pytest.mark.parametrize("every", [None, True])
@WAYS
def test_steps_that_a_scaler_skips_count(recorder: str, kind: dict[str, Any], every: bool | None) -> None:
    """No error; each has its scale before and after, also in the frames; a step that is made ends the row of three."""
    gc.collect()  # GradScalers of earlier tests
    model = nn.Sequential(Narrow(), Does(Tensor.half))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=2)
    with watched(model, recorder, gradients=every, max_frames=200, max_skipped_steps=3) as w:
        list(train(model, scaler, 6, kind))
        assert [str(step) for step in w.skipped_steps] == [
            "skipped step (scale 262144 → 131072)",
            "skipped step (scale 131072 → 65536)",
            *["skipped step (scale 65536 → 32768)"] * 2,
        ]
        assert ([step.batch for step in w.skipped_steps], w.counters["skipped_steps"]) == ([0, 1, 2, 5], 4)
        assert (report := w.report()).finding is None
    assert "Batch 0: skipped step (scale 262144 → 131072)." in report.to_text()
    notes = [(f.batch, str(r.note)) for f in w.frames for r in f.records if r.isfinite is False]
    assert {batch for batch, _ in notes} == {0, 1, 2, 5}
    assert all(note.startswith("skipped step (scale ") for _, note in notes)
    assert repr(Report.from_json(report.to_json())) == repr(report)


@pytest.mark.parametrize("has_other", [False, True])
def test_the_step_after_the_last_allowed_skip_is_a_failure(has_other: bool) -> None:
    """The third bad backward in a row raises. The steps of another optimizer, as of a GAN's other part, end no run."""
    gc.collect()  # GradScalers of earlier tests
    model = nn.ModuleList([Narrow(), nn.Linear(4, 1)])
    optimizer = torch.optim.SGD(model[1].parameters(), lr=1e-3)
    before = copy.deepcopy(model[0].state_dict())

    def train_both() -> None:
        for _ in train(model[0], torch.amp.GradScaler("cpu", init_scale=2.0**30), 9, {}):
            if has_other:
                optimizer.zero_grad()
                model[1](torch.ones(2, 4)).sum().backward()
                optimizer.step()

    with watch(model, gradients=True, max_skipped_steps=2) as w:
        with pytest.raises(NonFiniteError, match="the 2 steps before this one were skipped") as error:
            train_both()
        assert w.counters["skipped_steps"] == 2
    assert finding_of(error).batch == (4 if has_other else 2)
    assert_same_bits(model[0].state_dict(), before)


@pytest.mark.parametrize(("is_given", "scales"), [(True, " (scale 524288 → 262144)"), (False, "")])
def test_a_scaler_that_is_given_is_asked_where_there_are_several(is_given: bool, scales: str) -> None:
    """With two scalers in use none is guessed, until there is one; `scaler` names it."""
    gc.collect()  # GradScalers of earlier tests
    idle, scaler = torch.amp.GradScaler("cpu"), torch.amp.GradScaler("cpu", init_scale=2.0**19)
    idle.scale(torch.ones(1))
    with watch(model := Narrow(), gradients=True, scaler=scaler if is_given else None) as w:
        list(train(model, scaler, 1, {}))
        idle._enabled = False
        list(train(model, scaler, 1, {}))
        skipped = [f"skipped step{scales}", "skipped step (scale 262144 → 131072)"]
        assert [str(step) for step in w.skipped_steps] == skipped


@WAYS
def test_a_step_that_would_take_a_bad_gradient_is_stopped(recorder: str, kind: dict[str, Any]) -> None:
    """Raised by the step, once, weights and optimizer state to the bit as they were; clean steps are made."""
    model = nn.Sequential(Sick())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **kind)

    def step(is_sick: bool) -> None:
        model[0].sick = is_sick
        optimizer.zero_grad()
        model(torch.ones(3)).sum().backward()
        optimizer.step()

    with watched(model, recorder, gradients=True) as w:
        step(False)
        model[0].weight.data.zero_()
        before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        report = fault_of(step, True)
        assert_same_bits([model.state_dict(), optimizer.state_dict()], list(before))
        assert w.report() is report
        step(False)
    finding = report.finding
    assert (finding.module, finding.label, finding.batch) == ("0", "weight.grad", 1)
    assert finding.operation == "SqrtBackward0"
    assert bool((model[0].weight != 0).all())


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_finite_gradients_whose_sum_overflows_are_stopped(recorder: str) -> None:
    """Half precision, 40000 and 40000: no gradient was bad, their sum is; sums that are not pass, also many."""
    model = nn.Linear(1, 1, bias=False).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with watched(model, recorder, gradients=True):
        for i in range(8):
            model(torch.full((1, 1), 30000.0).half()).sum().backward()
            model(torch.full((1, 1), -30000.0).half()).sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=i % 2 == 0)
        before = model.weight.clone()
        for _ in range(2):
            model(torch.full((1, 1), 40000.0).half()).sum().backward()
        report = fault_of(optimizer.step)
    assert torch.equal(model.weight, before)
    finding = report.finding
    assert "the sum of several backwards" in report.to_text()
    assert (finding.label, finding.batch, finding.value) == ("weight.grad", 17, "inf")


def overflowing_attention() -> nn.Module:
    """Return attention in float16 whose `out_proj.weight`, which no module call uses, has a gradient above 65504."""
    attention = nn.MultiheadAttention(8, 1).half()
    with torch.no_grad():
        attention.in_proj_bias[16:] = 200.0
        attention.out_proj.weight.mul_(0.01)
    return attention


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_what_a_step_takes_is_read_whoever_wrote_it(recorder: str) -> None:
    """After the backward, beside the model, or of a module that nobody calls: the step leaves each weight as it was."""
    linear = nn.Linear(8, 1)
    attention = overflowing_attention()
    temperature = nn.Parameter(torch.zeros(()))
    x = torch.randn(512, 1, 8).half()

    def divided() -> None:
        linear(torch.ones(2, 8)).sum().backward()
        for parameter in linear.parameters():
            parameter.grad.div_(torch.zeros(()))

    def beside() -> None:
        (linear(torch.ones(2, 8)).sum() * temperature.sqrt()).backward()

    def uncalled() -> None:
        attention(x, x, x)[0].sum().backward()

    for model, backward, expected in (
        (linear, divided, ("", "step", "received", "weight.grad")),
        (linear, beside, ("(optimizer)", "step", "received", "param[0][2].grad")),
        (attention, uncalled, ("", "backward", "produced", "out_proj.weight.grad")),
    ):
        optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)
        optimizer.zero_grad()
        before = [parameter.detach().clone() for parameter in (*model.parameters(), temperature)]
        with watched(model, recorder, gradients=True, rerun=False):
            backward()
            finding = fault_of(optimizer.step).finding
        assert (finding.module, finding.phase, finding.origin, finding.label) == expected
        assert all(map(torch.equal, before, (*model.parameters(), temperature)))


def test_the_step_of_another_optimizer_is_made() -> None:
    """Two models, two optimizers, one watch: what is wrong in one holds up its own step alone."""
    model = nn.ModuleDict({"sick": Sick(), "well": nn.Linear(3, 1)})
    sick, well = (torch.optim.SGD(model[name].parameters(), lr=0.1) for name in ("sick", "well"))
    before = model["well"].weight.clone()
    with watch(model, gradients=True):
        (model["sick"](torch.ones(3)).sum() + model["well"](torch.ones(3)).sum()).backward()
        well.step()
        fault_of(sick.step)
    assert not torch.equal(model["well"].weight, before)


@pytest.mark.parametrize("every", [None, True])
def test_what_the_user_mends_or_drops_is_no_failure(every: bool | None) -> None:
    """Gradients made finite before the step pass, the 1st, 2nd and 4th with a line; a step left out is skipped."""
    model = nn.ModuleList([nn.Linear(3, 1), nn.LazyLinear(1)])
    optimizer = torch.optim.SGD([*model[1].parameters(), *model[0].parameters()], lr=0.1)

    def backward(is_bad: bool) -> None:
        optimizer.zero_grad()
        loss = model[0](torch.ones(3)).sum()
        (loss * (torch.nan if every is None else 1) + (loss * 0).sqrt() if is_bad else loss).backward()

    with warnings.catch_warnings(record=True) as caught, watch(model, gradients=every) as w:
        warnings.simplefilter("always")
        for _ in range(5):
            backward(True)
            for weight in model[0].parameters():
                torch.nan_to_num_(weight.grad, posinf=0.0)
            optimizer.step()
        assert w.report().finding is None
        for is_bad in (True, False):  # the first is dropped
            backward(is_bad)
        optimizer.step()
        backward(True)
        assert w.report().finding is not None
        optimizer.zero_grad()
        assert w.report().finding is None
        assert [str(step) for step in w.skipped_steps] == ["skipped step"] * 2
    lines = [str(warning.message).partition(" in the backward of batch ")[2] for warning in caught]
    assert [line.replace(";", " ").split()[0] for line in lines] == ["0", "1", "3"]
    assert "nothing was stopped" in lines[0]
    assert (caught[0].filename, w.counters["untaken_backwards"]) == (__file__, 5)


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_a_step_around_a_backward_or_inside_one_is_stopped(recorder: str) -> None:
    """A closure is looked at when its backward ends; a hook on a weight steps as soon as the gradient is there."""

    class Scaled(torch.optim.SGD):  # has an argument of its own before the closure
        __hash__ = None  # type: ignore[assignment]  # as a dataclass

        def step(self, scale: Any = 1.0, closure: Any = None) -> Any:
            return super().step(closure)

    model = nn.Sequential(Sick())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        loss = model(torch.ones(3)).sum()
        loss.backward()
        return loss

    for step, *given in ([optimizer.step, closure], [Scaled(model.parameters(), lr=0.1).step, 1.0, closure]):
        with watched(model, recorder, gradients=True, rerun=False):
            fault_of(step, *given)
    model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with watched(model, recorder, gradients=True, rerun=False):
        fault_of(closure)
    assert not model[0].weight.any()


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_weights_that_are_moved_by_hand_lead_back_to_the_backward(recorder: str) -> None:
    """No optimizer: the next forward meets a bad weight, and the report is that of the backward that made it so."""
    model = nn.Sequential(Sick())
    with watched(model, recorder, gradients=True, rerun=False):
        model(torch.ones(3)).sum().backward()
        with torch.no_grad():
            model[0].weight -= 0.1 * model[0].weight.grad
        finding = fault_of(model, torch.ones(3)).finding
    assert (finding.phase, finding.batch, finding.label) == ("backward", 0, "weight.grad")


@pytest.mark.parametrize("options", [{}, {"gradients": True}])
def test_a_learning_rate_that_is_not_finite_stops_the_step(options: dict[str, bool]) -> None:
    """A number or a tensor on the CPU, of the model's optimizer. No remark promises a re-run: it would not find it."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    beside = torch.optim.SGD([nn.Parameter(torch.zeros(2))], lr=float("nan"))
    before = model.weight.clone()
    with watch(model, **options):
        for rate in (float("nan"), torch.tensor(torch.inf, requires_grad=True)):
            optimizer.param_groups[0]["lr"] = rate
            model(torch.ones(2)).sum().backward()
            beside.step()
            finding = fault_of(optimizer.step).finding
            assert (finding.module, finding.label, finding.phase) == ("(optimizer)", "lr[0]", "step")
            assert finding.value == ("inf" if isinstance(rate, Tensor) else "nan")
            assert torch.equal(model.weight, before)
        optimizer.param_groups[0]["lr"] = 0.1
        optimizer.step()
    assert not torch.equal(model.weight, before)
    optimizer.param_groups[0]["lr"] = float("inf")
    with watch(model, on_nonfinite="record", **options) as w:
        model(torch.ones(2)).sum().backward()
        optimizer.step()
    assert (recorded := w.report().finding) is not None
    assert (recorded.label, recorded.remarks) == ("lr[0]", ())


def state_frames(w: Watch) -> list[dict[str, float | None]]:
    """The frames of steps, as label to largest magnitude."""
    return [{r.label: r.abs_max for r in f.records} for f in w.frames if f.phase == "step"]


@WAYS
def test_the_state_of_an_optimizer_has_a_frame_a_step(recorder: str, kind: dict[str, Any]) -> None:
    """exp_avg and exp_avg_sq of every parameter by its name, as they are after the step; step counts are left out."""
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), **kind)
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    with watched(model, recorder, optimizer=optimizer, max_frames=100) as w:
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            other.step()
        (first, latest) = state_frames(w)
        expected = {
            f"{key}[{name}]": optimizer.state[p][key].abs().max().item()
            for name, p in model.named_parameters()
            for key in ("exp_avg", "exp_avg_sq")
        }
    assert latest == expected
    assert first.keys() == latest.keys()
    assert {f.class_name for f in w.frames if f.phase == "step"} == {"AdamW"}


def test_a_bad_state_is_a_failure_of_the_step_that_makes_or_meets_it() -> None:
    """A gradient whose square leaves float32. A state that was loaded so is met before a weight changes."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    with watch(model, optimizer=optimizer, gradients=True):
        (model(torch.ones(1)).sum() * 1e25).backward()
        finding = fault_of(optimizer.step).finding
    assert (finding.phase, finding.batch) == ("step", 0)
    assert f"{finding.origin} {finding.module} {finding.label}" == "buffer (optimizer) exp_avg_sq[0.weight]"
    before = model[0].weight.clone()
    with watch(model, optimizer=optimizer):
        model(torch.ones(1)).sum().backward()
        fault_of(optimizer.step)
    assert torch.equal(model[0].weight, before)


@pytest.mark.compile
@pytest.mark.filterwarnings("error::UserWarning")
def test_the_state_is_read_after_a_compiled_step() -> None:
    """The hooks of the step run as they are, and torch.compile warns of nothing."""
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = torch.compile(optimizer.step, backend="eager")
    with watch(model, optimizer=optimizer, gradients=True, max_frames=100) as w:
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            step()
        expected = [optimizer.state[x]["momentum_buffer"].abs().max().item() for x in model.parameters()]
        assert [*state_frames(w)[2].values()] == expected
    torch._dynamo.reset()
