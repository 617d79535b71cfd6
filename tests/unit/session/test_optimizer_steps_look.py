"""The look before an optimizer's step, over a device that runs when told: no fault passes, and what is waited for."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanwatch.instrumentation.global_hooks import after_steps, before_steps
from nanwatch.numerics import _extension
from nanwatch.report.report import NonFiniteError
from nanwatch.session.api import Watch, watch
from support.stand_in_device import ReadsFoundInf, StandIn, stand_in
from support.toys import Plant, Scale, chain, in_threads, mlp
from support.training import are_unchanged, copies, stopped

pytestmark = pytest.mark.skipif(_extension.C is None, reason="the Python recorder waits for each row")
INF = float("inf")
X = torch.ones(2, 3)


def forward_and_backward(model: nn.Module) -> None:
    """Run a forward and a backward, as a training loop does before its step."""
    model(X).sum().backward()


def later_work(device: StandIn) -> list[str]:
    """Enqueues work on the current stream, as a backward does; what it returns says once it has been done."""
    done: list[str] = []
    device._enqueue(device.stream, lambda: done.append("done"))
    return done


@contextlib.contextmanager
def late(model: nn.Module, check: Any = "async") -> Iterator[tuple[StandIn, torch.optim.Optimizer, Watch]]:
    """The model watched on a device that runs when told, and an optimizer of its weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stand_in() as device, watch(model, check=check, rerun=False) as w:
        yield device, optimizer, w


def assert_told_by_the_next_step(device: StandIn, optimizer: torch.optim.Optimizer) -> None:
    """Once the device has delivered, the step raises what it found."""
    device.run()
    with pytest.raises(NonFiniteError):
        optimizer.step()


def hooks() -> int:
    """How many hooks there are for the steps of all optimizers."""
    return len(before_steps) + len(after_steps)


# A fault whose rows have not come


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Adagrad"])
@pytest.mark.parametrize("fused", [False, True])
def test_a_late_fault_is_raised_before_the_step(kind: str, fused: bool) -> None:
    """The step waits once and raises the forward's failure; neither weights nor the optimizer's state have changed."""
    model = chain(Plant(b1=INF))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, fused=fused)
    with stand_in() as device:
        w = watch(model, check="async", rerun=False)
        forward_and_backward(model)
        optimizer.step()
        before, state = copies(model), repr(optimizer.state_dict())
        forward_and_backward(model)
        assert device.waits == 1
        with pytest.raises(NonFiniteError) as error:
            optimizer.step()
        assert device.waits == 2
        assert are_unchanged(model, before)
        assert repr(optimizer.state_dict()) == state
        finding = error.value.report.finding
        assert finding is not None
        assert (finding.batch, finding.module, finding.label, finding.phase) == (1, "1", "output", "forward")
        w.stop()


def test_nothing_is_waited_for_when_the_rows_have_come() -> None:
    """Then the step asks for nothing and tells of the fault all the same."""
    model = chain(Plant(b1=INF))
    with late(model) as (device, optimizer, _):
        forward_and_backward(model)
        device.run()
        optimizer.step()
        before = copies(model)
        forward_and_backward(model)
        device.run()
        with pytest.raises(NonFiniteError):
            optimizer.step()
        assert device.waits == 0
        assert are_unchanged(model, before)


def test_what_was_enqueued_behind_the_forward_is_not_waited_for() -> None:
    """The wait is for the forward's mark: the backward that lies behind it keeps the device busy."""
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stand_in() as device, watch(model, check="async"):
        model(X).sum().backward()
        done = later_work(device)
        optimizer.step()
        assert device.waits == 1
        assert done == []


def test_forwards_and_backwards_never_wait() -> None:
    """Only steps do: as many waits as steps, and none in between."""
    model = chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stand_in() as device, watch(model, check="async"):
        for steps in range(5):
            for _ in range(3):
                forward_and_backward(model)
                assert device.waits == steps
            optimizer.step()
            assert device.waits == steps + 1


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_one_look_for_all_micro_batches(bad: int) -> None:
    """With gradient accumulation the step waits once, for the latest forward, and finds a fault in any of them."""
    model = chain(Plant(**{f"b{bad}": INF}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stand_in() as device:
        w = watch(model, check="async", rerun=False)
        before = copies(model)
        for _ in range(3):
            forward_and_backward(model)
        done = later_work(device)
        with pytest.raises(NonFiniteError) as error:
            optimizer.step()
        assert error.value.report.batch == bad
        assert device.waits == 1
        assert done == []
        assert are_unchanged(model, before)
        w.stop()


@settings(max_examples=60, deadline=None)
@given(
    moves=st.lists(
        st.sampled_from(["forward", "bad", "evaluate", "run", "run some", "step", "other"]), max_size=25
    )
)
def test_no_step_takes_a_fault(moves: list[str]) -> None:
    """In any order of forwards, steps and progress of the device: a step raises if a forward before it was bad."""
    plant = Plant()
    model, stranger = chain(plant), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = torch.optim.SGD(stranger.parameters(), lr=0.1)
    told = 0
    with stand_in() as device:
        w = watch(model, check="async", rerun=False)
        for move in moves:
            waits, may_wait = device.waits, move == "step" and w._recorder.may_be_pending
            before, completed = copies(model), False
            try:
                if move == "run":
                    device.run()
                elif move == "run some":
                    device.run(7)
                elif move == "step":
                    optimizer.step()
                elif move == "other":
                    other.step()
                elif move == "evaluate":
                    with torch.no_grad():
                        model(X)
                else:
                    if move == "bad":
                        plant.values[plant.calls] = INF
                    forward_and_backward(model)
                completed = True
            except NonFiniteError:
                told += 1
                assert are_unchanged(model, before)
                plant.values.pop(plant.calls, None)  # the call was not made, for the fault of one before
            bad = sum(call < plant.calls for call in plant.values)
            assert told <= bad
            assert told == bad or not (completed and move == "step")
            assert device.waits - waits <= may_wait
            optimizer.zero_grad()
        device.run()
        w._leave()


# Which steps, and which forwards


def test_the_step_of_another_models_optimizer_does_not_wait() -> None:
    """The optimizer holds none of the watched parameters. Rows that have come by then are reported before its step."""
    model, stranger = chain(Plant(b0=INF)), nn.Linear(1, 1)
    optimizer = torch.optim.SGD(stranger.parameters(), lr=0.1)
    with stand_in() as device, watch(model, check="async", rerun=False):
        forward_and_backward(model)
        optimizer.step()
        assert device.waits == 0
        device.run()
        with pytest.raises(NonFiniteError):
            optimizer.step()


def test_two_optimizers_of_one_model() -> None:
    """The first step waits for both; the second finds nothing left to wait for."""
    model = chain(Plant(b1=INF))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[2])]
    with stand_in() as device, watch(model, check="async", rerun=False):
        forward_and_backward(model)
        for one in optimizers:
            one.step()
        assert device.waits == 1
        before = copies(model)
        forward_and_backward(model)
        with pytest.raises(NonFiniteError):
            optimizers[1].step()
        assert device.waits == 2
        assert are_unchanged(model, before)


def test_two_watched_models_with_an_optimizer_each() -> None:
    """In a GAN each step waits for the forwards of its own model."""
    models = [chain(), chain(Plant(b0=INF))]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    with stand_in() as device:
        watches = [watch(model, check="async", rerun=False) for model in models]
        for model in models:
            forward_and_backward(model)
        optimizers[0].step()
        assert device.waits == 1
        before = copies(models[1])
        # The second model's rows lie behind those of the first, which alone were waited for.
        with pytest.raises(NonFiniteError):
            optimizers[1].step()
        assert device.waits == 2
        assert are_unchanged(models[1], before)
        for w in watches:
            w.stop()


def test_parameters_that_an_optimizer_gets_later() -> None:
    """An optimizer becomes the model's when it is given one of its parameters."""
    model = chain(Plant(b1=INF))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with stand_in() as device, watch(model, check="async", rerun=False):
        forward_and_backward(model)
        optimizer.step()
        assert device.waits == 0
        optimizer.add_param_group({"params": list(model[2].parameters())})
        forward_and_backward(model)
        with pytest.raises(NonFiniteError):
            optimizer.step()
        assert device.waits == 1


@pytest.mark.parametrize("is_given", [False, True])
def test_an_optimizer_of_copies_is_the_models_when_it_is_given(is_given: bool) -> None:
    """Nothing leads from float32 copies to the weights they are of; `optimizer=` does."""
    model = chain(Plant(b0=INF))
    optimizer = torch.optim.SGD([nn.Parameter(x) for x in copies(model)], lr=0.1)
    named = optimizer if is_given else None
    with stand_in() as device:
        w = watch(model, check="async", rerun=False, optimizer=named)
        forward_and_backward(model)
        if is_given:
            with pytest.raises(NonFiniteError):
                optimizer.step()
        else:
            optimizer.step()
        assert device.waits == is_given
        w._leave()


def test_evaluation_is_not_waited_for() -> None:
    """A forward without grad mode gives a step nothing; a fault in it is told when it has come."""
    model = chain(Plant(b0=INF))
    for mode in (torch.no_grad, torch.inference_mode):
        model[1].calls = 0
        with late(model) as (device, optimizer, _):
            with mode():
                model(X)
            optimizer.step()
            assert device.waits == 0
            assert_told_by_the_next_step(device, optimizer)


def test_an_evaluation_on_another_stream_hides_no_fault() -> None:
    """Batches are told in their order, so one that was to be told before the fault is waited for too."""
    model = chain(Plant(b1=INF))
    with late(model) as (device, optimizer, _):
        device.stream = 2
        with torch.no_grad():
            model(X)
        device.stream = 1
        forward_and_backward(model)
        with pytest.raises(NonFiniteError) as error:
            optimizer.step()
        assert error.value.report.batch == 1
        assert device.waits == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_that_is_checkpointed_as_a_whole(reentrant: bool) -> None:
    """With use_reentrant=True its forward has no grad mode; that it is run again says that the step takes it."""
    model = chain(Plant(b0=INF))
    with late(model) as (device, optimizer, _):
        before = copies(model)
        x = X.clone().requires_grad_()
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
        done = later_work(device)
        with pytest.raises(NonFiniteError):
            optimizer.step()
        assert device.waits == 1
        assert done == []
        assert are_unchanged(model, before)


@pytest.mark.parametrize("check", ["batch", "async"])
def test_a_recomputation_is_not_waited_for(check: Any) -> None:
    """A recomputation may be the last task of a backward. The step waits for the forward alone."""
    scale = Scale()
    model = nn.Sequential(scale, nn.Linear(3, 3))
    with late(model, check) as (device, optimizer, _):
        loss = checkpoint(model, X, use_reentrant=False).sum()
        scale.factor = INF  # only in the recomputation
        loss.backward()
        optimizer.step()
        assert device.waits == 1
        assert_told_by_the_next_step(device, optimizer)


def test_batch_has_nothing_to_wait_for_at_a_step() -> None:
    """With check="batch" a forward has been waited for at its end, and raised there."""
    model = chain(Plant(b1=INF))
    with late(model, "batch") as (device, optimizer, _):
        forward_and_backward(model)
        assert device.waits == 1
        optimizer.step()
        assert device.waits == 1
        before = copies(model)
        with pytest.raises(NonFiniteError):
            model(X)
        assert are_unchanged(model, before)


# Closures


@pytest.mark.parametrize("check", ["batch", "async"])
@pytest.mark.parametrize("kind", ["SGD", "LBFGS"])
@pytest.mark.parametrize("by_name", [False, True])
def test_a_forward_inside_the_step(check: Any, kind: str, by_name: bool) -> None:
    """The closure makes forward and backward, as in Lightning, and raises the failure before a weight changes."""
    model = chain(Plant(b1=INF))
    options = {"max_iter": 1} if kind == "LBFGS" else {}
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1, **options)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(X).sum()
        loss.backward()
        return loss

    def step() -> Any:
        return optimizer.step(closure=closure) if by_name else optimizer.step(closure)

    with stand_in() as device, watch(model, check=check, rerun=False):
        assert step().item() == pytest.approx(chain()(X).sum().item())
        assert device.waits == 1
        before = copies(model)
        with pytest.raises(NonFiniteError):
            step()
        assert device.waits == 2
        assert are_unchanged(model, before)


@pytest.mark.parametrize("check", ["batch", "async"])
@pytest.mark.parametrize("kind", ["SGD", "LBFGS"])
def test_a_bad_forward_inside_the_step_with_gradients(check: Any, kind: str) -> None:
    """Its backward has bad gradients too: the step is stopped all the same, and the forward is named."""
    model = chain(Plant(b0=INF))
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)
    before = copies(model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(X).sum()
        loss.backward()
        return loss

    with stand_in():
        w = watch(model, check=check, gradients=True, rerun=False)
        with pytest.raises(NonFiniteError) as caught:
            optimizer.step(closure)
        assert caught.value.report.finding.phase == "forward"
        assert are_unchanged(model, before)
        w.stop()


def test_a_closure_made_by_partial() -> None:
    """Any callable is a closure, and is called once, with its own arguments."""
    model = chain(Plant(b0=INF))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given_numbers: list[int] = []

    def closure(number: int) -> None:
        given_numbers.append(number)
        forward_and_backward(model)

    with stand_in(), watch(model, check="async", rerun=False), pytest.raises(NonFiniteError):
        optimizer.step(functools.partial(closure, 7))
    assert given_numbers == [7]


def test_what_else_a_step_is_given_is_handed_on() -> None:
    """An argument that is no closure comes as it was, also one that can be called."""
    seen: list[Any] = []

    class Takes(torch.optim.SGD):
        def step(self, helper: Any = None, closure: Any = None, *, mode: str = "") -> None:
            seen.append((helper, closure, mode))

    model, helper = mlp(), nn.ReLU()
    optimizer = Takes(model.parameters(), lr=0.1)
    with watch(model, check="async"):
        optimizer.step(helper)
        optimizer.step(helper, mode="fast")
        optimizer.step(helper, len)
        optimizer.step()
    assert seen[:2] == [(helper, None, ""), (helper, None, "fast")]
    assert seen[2][0] is helper
    assert seen[2][1]("four") == 4
    assert seen[3] == (None, None, "")


def test_an_optimizer_that_steps_inside_the_backward() -> None:
    """The first of its steps waits for the forward, and no weight has changed; the others find it told."""
    model = chain(Plant(b1=INF))
    optimizers = {x: torch.optim.SGD([x], lr=0.1) for x in model.parameters()}

    def step(x: Tensor) -> None:
        optimizers[x].step()

    for x in model.parameters():
        x.register_post_accumulate_grad_hook(step)
    with stand_in() as device, watch(model, check="async", rerun=False):
        forward_and_backward(model)
        assert device.waits == 1
        before = copies(model)
        with pytest.raises(NonFiniteError):
            forward_and_backward(model)
        assert device.waits == 2
        assert are_unchanged(model, before)


# GradScaler


class Unused(nn.Module):
    """Calls a module whose result leads nowhere: its fault leaves the gradients finite."""

    def __init__(self, aside: nn.Module) -> None:
        super().__init__()
        self.layer, self.aside = nn.Linear(3, 3), aside

    def forward(self, x: Tensor) -> Tensor:
        self.aside(x)
        return self.layer(x)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_scaler_that_makes_the_step(is_read: bool) -> None:
    """Where it has read `found_inf` nothing is waited for; the fault is raised before its step changes a weight."""
    torch.manual_seed(0)
    model = Unused(Plant(b1=INF))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stand_in() as device:
        scaler = ReadsFoundInf(device) if is_read else torch.amp.GradScaler("cpu", init_scale=4.0)
        w = watch(model, check="async", rerun=False)
        for batch in range(2):
            optimizer.zero_grad()
            scaler.scale(model(X).sum()).backward()
            before = copies(model)
            if batch == 1:
                with pytest.raises(NonFiniteError):
                    scaler.step(optimizer)
                assert are_unchanged(model, before)
            else:
                scaler.step(optimizer)
                scaler.update()
                assert not are_unchanged(model, before)
        assert device.waits == (0 if is_read else 2)
        w.stop()


def test_a_step_that_the_scaler_skips_waits_for_nothing() -> None:
    """No weight changes, and the forward's fault is told by the next call."""
    model = chain(Plant(b0=INF))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stand_in() as device:
        scaler = ReadsFoundInf(device)
        w = watch(model, check="async", rerun=False)
        before = copies(model)
        scaler.scale(model(X).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2.0
        assert are_unchanged(model, before)
        with pytest.raises(NonFiniteError):
            model(X)
        assert device.waits == 0
        w._leave()


# Other ways to run and to act


def test_a_captured_step_waits_for_nothing() -> None:
    """Inside a capture into a graph a wait would be an error; what is late is told afterwards."""
    model = chain(Plant(b0=INF))
    with late(model) as (device, optimizer, _):
        forward_and_backward(model)
        device.capturing = True
        optimizer.step()
        device.capturing = False
        assert device.waits == 0
        with pytest.raises(NonFiniteError):
            optimizer.step()
        assert device.waits == 1


@pytest.mark.compile
@pytest.mark.slow
@pytest.mark.parametrize("is_reported", [False, True])
def test_a_compiled_step_is_looked_at(is_reported: bool) -> None:
    """torch.compile calls the hooks of a step outside of its graph: also from the second step on, and what a report has
    found is raised as well.
    """
    model = chain(Plant(b2=INF))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend="eager")
    with stand_in() as device, watch(model, check="async", rerun=False) as w:
        for _ in range(2):
            forward_and_backward(model)
            step()
        before = copies(model)
        forward_and_backward(model)
        if is_reported:
            device.run()
            assert w.report().finding is not None
        with pytest.raises(NonFiniteError):
            step()
        assert device.waits == (2 if is_reported else 3)
        assert are_unchanged(model, before)


def test_a_fault_that_a_report_has_found_is_raised_by_the_step() -> None:
    """The step, or the next call of the model, whichever comes first, raises it, once."""
    model = chain(Plant(b0=INF))
    with late(model) as (device, optimizer, w):
        forward_and_backward(model)
        device.run()
        assert w.report().finding is not None
        with stopped(model):
            optimizer.step()
        optimizer.step()


def test_threads_that_step_at_once() -> None:
    """While one thread waits others tell of its batches: every batch is told once, and the fault to one of them."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    errors: list[BaseException] = []

    def work(number: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for step in range(15):
            try:
                model(torch.full((2, 8), INF if (number, step) == (2, 10) else 1.0))
                optimizer.step()
            except NonFiniteError as error:
                errors.append(error)

    with stand_in(), watch(model, check="async", max_frames=10_000, rerun=False, _verify_hits=True) as w:
        in_threads(4, work)
        w.look()
        batches = (w.batch or 0) + 1
        assert [sum(frame.batch == batch for frame in w.frames) for batch in range(batches)] == [4] * batches
    assert len(errors) == 1
    assert w.counters["stale_hits"] == 0


def test_the_other_ways_to_act() -> None:
    """The other settings report in time and let the step be made."""
    called: list[Any] = []
    for action in ("warn", "record", called.append):
        model = chain(Plant(b0=INF))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with stand_in(), watch(model, check="async", on_nonfinite=action) as w:
            before = copies(model)
            forward_and_backward(model)
            if action == "warn":
                with pytest.warns(RuntimeWarning, match="inf first seen"):
                    optimizer.step()
            else:
                optimizer.step()
            assert w.report().finding is not None
            assert len(called) == (action not in ("warn", "record"))
            assert not are_unchanged(model, before)


def test_with_gradients_the_forward_is_named_and_not_what_came_of_it() -> None:
    """A backward that a bad forward spoilt is not told in its place, though it was seen first."""
    model = chain(Plant(b0=INF))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stand_in(), watch(model, check="async", gradients=True, rerun=False):
        forward_and_backward(model)
        with stopped(model) as error:
            optimizer.step()
        finding = error.value.report.finding
        assert finding is not None
        assert (finding.phase, finding.module) == ("forward", "1")


def test_a_device_that_has_failed_leaves_the_step_its_own_error() -> None:
    """Rows that never come are no fault, and nobody waits for them for ever."""
    model = chain(Plant(b0=INF))
    with late(model) as (device, optimizer, w):
        forward_and_backward(model)
        device.break_down()
        optimizer.step()
        assert all(str(r.note).startswith("not checked") for f in w.frames for r in f.records)


def test_a_watched_run_has_the_weights_of_an_unwatched_one() -> None:
    """Waiting at the step changes no number."""
    ends = []
    for is_watched in (False, True):
        model = chain(nn.Tanh())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        with stand_in():
            w = watch(model, check="async", enabled=is_watched)
            for _ in range(4):
                optimizer.zero_grad()
                forward_and_backward(model)
                optimizer.step()
            w.stop()
        ends.append(copies(model))
    assert all(map(torch.equal, *ends))


def test_nothing_is_left_behind() -> None:
    """After stop(), without it once the watch is gone, and without anything watched: no hook."""
    gc.collect()
    before = hooks()
    model = mlp()
    w = watch(model, check="async")
    assert hooks() > before
    w.stop()
    assert hooks() == before
    watch(model, enabled=False)
    assert hooks() == before
    watch(model, check="async")
    del model, w
    gc.collect()
    assert hooks() == before
