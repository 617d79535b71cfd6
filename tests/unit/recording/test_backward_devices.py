"""Gradients on a device that runs when told: reports are those of the host, with one wait a backward."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanwatch.numerics import _extension
from nanwatch.report.report import NonFiniteError, Report
from nanwatch.session.api import Watch, watch
from support.forks import SIDE, Fork, fork_backward, range_of, ranges
from support.gradient_models import Narrow, Net, Sick, Spoil, Spoiling, backward_frames, loss_of
from support.stand_in_device import BROKEN, OLD_DRIVER, ReadsFoundInf, StandIn, stand_in
from support.toys import chain, in_threads, mlp, text_of
from support.training import are_unchanged, copies, stopped

pytestmark = pytest.mark.skipif(_extension.C is None, reason="the Python recorder waits for each row")
X = torch.ones(2, 3)
INF = float("inf")


class SpoilsLater(nn.Module):
    """The identity, whose gradient gets an inf in the backwards named."""

    def __init__(self, *batches: int) -> None:
        super().__init__()
        self.batches, self.calls = batches, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return Spoil.apply(x) if self.calls - 1 in self.batches else x + 0


@contextlib.contextmanager
def trained(model: nn.Module, **options: Any) -> Iterator[tuple[StandIn, torch.optim.Optimizer, Watch]]:
    """The model watched on a device that runs when told, with its gradients, and an optimizer of its weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings_of_watch = {"rerun": False, "gradients": True, **options}
    with stand_in() as device, watch(model, **settings_of_watch) as w:
        yield device, optimizer, w


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), spoils=st.booleans(), behind=st.booleans(), skips=st.sampled_from([0, 20]))
def test_reports_are_those_of_the_host(seed: int, spoils: bool, behind: bool, skips: int) -> None:
    """Random graphs over three batches, one of which may be spoilt: every frame in its order, and the report."""
    found = {}
    for check, place, holds in (
        ("module", -1, True),
        ("batch", 0, True),
        ("batch", 0, False),
    ):
        model = Net(seed)
        if spoils:
            model.steps[0] = Spoiling(model.steps[0], behind)
        torch.manual_seed(0)
        with stand_in(place=lambda x, place=place: place, holds=holds):
            with watch(
                model,
                gradients=True,
                max_frames=1000,
                on_nonfinite="record",
                check=check,
                max_skipped_steps=skips,
                _verify_hits=True,
            ) as w:
                for _ in range(3):
                    loss_of(model(torch.randn(2, 4, requires_grad=True))).backward()
            found[check, place, holds] = text_of(w)
            assert w.counters["stale_hits"] == 0
    assert len(set(found.values())) == 1


@pytest.mark.parametrize("accumulates", [1, 3])
def test_the_step_is_stopped_before_it_takes_a_late_gradient(accumulates: int) -> None:
    """Whichever of the backwards behind it was bad; with the finding and the frames of the host."""
    reports: list[Report] = []
    for place in (-1, 0):
        model = chain(SpoilsLater(2 * accumulates - 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with stand_in(place=lambda x, place=place: place):
            w = watch(model, gradients=True, rerun=False)
            for _ in range(accumulates):
                model(X).sum().backward()
            optimizer.step()
            for _ in range(accumulates):
                model(X).sum().backward()
            with stopped(model) as error:
                optimizer.step()
            w._leave()
        reports.append(error.value.report)
    assert reports[0].to_json() == reports[1].to_json()
    finding = reports[0].finding
    assert finding is not None
    assert (finding.phase, finding.module, finding.batch) == ("backward", "1", 2 * accumulates - 1)


def test_a_forward_and_a_backward_wait_once_each() -> None:
    """Each tensor's read is launched when it appears, and awaited when its forward or backward is over."""
    model = mlp()
    with trained(model) as (device, optimizer, w):
        for count in (0, 2):
            loss = model(X).sum()
            assert device.waits == count + 1
            loss.backward()
            assert device.launches[-7:] == [1] * 7  # of three outputs and four weights
            assert device.waits == count + 2
            optimizer.step()
            assert device.waits == count + 2
        assert [frame.name for frame in backward_frames(w)][-4:] == ["2", "1", "0", ""]


@pytest.mark.parametrize("place", [0, -1])
def test_the_optimizer_of_what_feeds_the_model_takes_no_bad_gradient(place: int) -> None:
    """A generator in front of a watched discriminator: its step is stopped too."""
    generator, model = nn.Linear(3, 3), chain(SpoilsLater(0))
    optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
    with stand_in(place=lambda x: place):
        w = watch(model, gradients=True, rerun=False)
        model(generator(X)).sum().backward()
        with stopped(generator):
            optimizer.step()
        w._leave()


def test_module_has_each_gradient_when_it_comes() -> None:
    """With check="module" each is read at once, and the failure is known when the backward is over."""
    model = chain(SpoilsLater(0))
    with trained(model, check="module") as (device, _, w):
        loss = model(X).sum()
        launches = len(device.launches)
        loss.backward()
        assert len(device.launches) == launches
        finding = w.report().finding
        assert finding is not None
        assert finding.phase == "backward"


@pytest.mark.parametrize("elsewhere", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_skips_of_a_checkpointed_model_are_counted_once(elsewhere: bool, reentrant: bool) -> None:
    """Also where the backward, with the recomputation in it, runs on a thread of its own, as those of a device do."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Narrow()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = checkpoint(self.inner, x, use_reentrant=reentrant)
            return found

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Checkpointed())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
    with stand_in() as device, ThreadPoolExecutor(1) as pool:
        scaler = ReadsFoundInf(device, init_scale=2.0**60)
        w = watch(model, gradients=True, scaler=scaler, max_skipped_steps=9, rerun=False)
        for step in range(4):
            optimizer.zero_grad()
            loss = scaler.scale(model(torch.ones(2, 4)).sum())
            if elsewhere:
                pool.submit(loss.backward).result()
            else:
                loss.backward()
            scaler.step(optimizer)
            scaler.update()
            assert w.counters["skipped_steps"] <= step + 1
        assert w.counters["skipped_steps"] == 4
        w.stop()


@pytest.mark.parametrize("kind", ["SGD", "LBFGS"])
@pytest.mark.parametrize("elsewhere", [True, False])
@pytest.mark.parametrize("place", [0, -1])
def test_a_closure_is_looked_at_when_it_has_run(kind: str, elsewhere: bool, place: int) -> None:
    """Also where its backward ended on another thread, as those of a device do: no weight has changed."""
    model = nn.Sequential(Sick())
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.1)

    def closure() -> Tensor:
        loss: Tensor = model(torch.ones(3)).sum()
        if elsewhere:
            in_threads(1, lambda _: loss.backward())
        else:
            loss.backward()
        return loss

    with stand_in(place=lambda x: place):
        w = watch(model, gradients=True, rerun=False)
        with stopped(model):
            optimizer.step(closure)
        w._leave()


def test_each_step_inside_a_backward_is_waited_for() -> None:
    """One optimizer a weight: the gradients up to there, and no others, are known before the step."""
    model = chain(SpoilsLater(1))
    for p in model.parameters():
        optimizer = torch.optim.SGD([p], lr=0.1)
        p.register_post_accumulate_grad_hook(lambda _, optimizer=optimizer: optimizer.step())
    with stand_in() as device:
        w = watch(model, gradients=True, rerun=False)
        model(X).sum().backward()
        assert device.waits == 1 + 4  # for the forward, and for each gradient
        last, first = copies(model[2]), copies(model[0])
        with pytest.raises(NonFiniteError):
            model(X).sum().backward()
        # The layer behind what was spoilt has had its good step.
        assert are_unchanged(model[0], first)
        assert not are_unchanged(model[2], last)
        w._leave()


def test_sums_of_late_gradients() -> None:
    """Each is finite, and what they add up to is not: the step is stopped, and one below the end is made."""
    for factor in (0.4, 0.6):
        model = nn.Linear(1, 1, bias=False)
        with trained(model) as (_, optimizer, _w):
            for _ in range(2):
                model(torch.full((1, 1), torch.finfo(torch.float32).max * factor)).sum().backward()
            if factor < 0.5:
                optimizer.step()
                continue
            with stopped(model) as error:
                optimizer.step()
            assert "the sum of several backwards" in error.value.report.to_text()


@pytest.mark.parametrize("place", [0, -1])
def test_a_sum_is_looked_at_by_a_step_inside_the_backward(place: int) -> None:
    """Two finite gradients add up to inf, and the step is made as soon as the second is there."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    calls = []

    def accumulated(_: Tensor) -> None:
        calls.append(1)
        if len(calls) == 2:
            optimizer.step()

    model.weight.register_post_accumulate_grad_hook(accumulated)
    x = torch.full((1, 1), torch.finfo(torch.float32).max * 0.6)
    with stand_in(place=lambda x: place):
        w = watch(model, gradients=True, rerun=False)
        with stopped(model):
            for _ in range(2):
                model(x).sum().backward()
        w._leave()


def test_a_gradient_that_comes_again_is_as_it_was() -> None:
    """A write that no version tells of, between two places of one gradient, is not seen; `_verify_hits` counts it."""

    def spoils(g: Tensor) -> None:
        g.data[3, 5] = float("inf")

    gradient = torch.randn(SIDE, SIDE)
    for hook, stale in ((spoils, 1), (None, 0)):
        with stand_in():
            w, _ = fork_backward("device", Fork(second=hook), gradient.clone())
            w.stop()
            assert w.counters["stale_hits"] == stale
            assert ranges(w)["first"] == ranges(w)["second"] == range_of(gradient)


def test_a_device_that_fails_leaves_the_users_error() -> None:
    """Rows that have not arrived are marked; the step is made, because torch itself raises the device's error."""
    model = mlp()
    with trained(model, on_nonfinite="record") as (device, optimizer, w):
        model[0].weight.register_hook(lambda _: device.break_down())
        model(X).sum().backward()
        optimizer.step()
        notes = {str(record.note) for frame in backward_frames(w) for record in frame.records}
        assert any(f"error {BROKEN} of the stand-in" in note for note in notes)
        assert w.report().finding is None


@pytest.mark.parametrize("code", [7, OLD_DRIVER])
def test_a_launch_that_is_refused_is_read_at_once(code: int) -> None:
    """One gradient, or all from there on, is read like any tensor that is not plain."""
    model = mlp()
    with trained(model) as (device, _, w):
        loss = model(X).sum()
        launches = len(device.launches)
        device.fail_next = code
        loss.backward()
        assert len(device.launches) - launches == (0 if code == OLD_DRIVER else 6)
        rows = [record for frame in backward_frames(w) for record in frame.records]
        assert len(rows) == 10
        assert all(record.isfinite for record in rows)


def test_a_backward_in_a_capture_sends_nothing() -> None:
    """A backward in a capture has no replays to report, and is read as it comes."""
    model = mlp()
    with trained(model) as (device, _, w):
        loss = model(X).sum()
        launches = len(device.launches)
        device.capturing = True
        loss.backward()
        device.capturing = False
        assert len(device.launches) == launches
        assert len(backward_frames(w)) == 4


def test_counts_are_made_at_once() -> None:
    """counts=True looks at each tensor itself."""
    model = mlp()
    with trained(model, counts=True) as (device, _, w):
        model(X).sum().backward()
        assert not device.launches
        assert all(r.health is not None for frame in backward_frames(w) for r in frame.records)


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("how", ["forward", "step", "report"])
def test_a_watch_that_is_stopped_by_what_a_broken_backward_tells(how: str, place: int) -> None:
    """The user's exception has ended the backward; what is told of it later stops the watch, and nothing else."""
    model = chain(SpoilsLater(0))
    told = []

    def stop(report: Report) -> None:
        told.append(report.finding)
        w.stop()

    def breaks(gradient: Tensor) -> None:
        raise LookupError("mine")

    with stand_in(place=lambda x: place) as device:
        w = watch(model, gradients=True, rerun=False, max_skipped_steps=0, on_nonfinite=stop)
        x = X.clone().requires_grad_()
        x.register_hook(breaks)
        with pytest.raises(LookupError):
            model(x).sum().backward()
        device.run()
        if how == "forward":
            model(X)
        elif how == "step":
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        else:
            w.report()
    assert [finding.phase for finding in told if finding is not None] == ["backward"]


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("holds", [True, False])
def test_threads_that_train_and_look_at_once(holds: bool) -> None:
    """Three train one model, with bad gradients now and then, and one asks for all that can be asked: nobody fails."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    over = threading.Event()
    errors: list[BaseException] = []
    with stand_in(holds=holds) as device:
        w = watch(model, gradients=True, rerun=False, on_nonfinite="record")
        asks: list[Any] = [w.report, lambda: w.frames, lambda: device.run(5), lambda: w.counters]
        asks.append(lambda: (w.pause(), w.resume()))

        def work(number: int) -> None:
            draw = random.Random(number)
            try:
                while not over.is_set():
                    if number == 3:
                        draw.choice(asks)()
                        late = time.monotonic() - start
                        if (late > 1 and w.counters["frames"] > 100) or late > 60:
                            over.set()
                        continue
                    loss = model(torch.randn(2, 3)).sum()
                    try:
                        (loss * INF if draw.random() < 0.1 else loss).backward()
                    except RuntimeError as error:
                        # Another thread's step has written a weight that this backward needs.
                        if "modified by an inplace operation" not in str(error):
                            raise
                    if draw.random() < 0.3:
                        optimizer.step()
            except BaseException as error:
                errors.append(error)
                over.set()

        start = time.monotonic()
        in_threads(4, work)
        frames = w.counters["frames"]
        w.stop()
    assert not errors
    assert frames > 100
