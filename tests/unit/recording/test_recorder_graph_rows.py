"""Frames of the replays of a captured batch, over a stand-in for the device whose graphs are run by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.numerics import _extension
from nanwatch.report.report import NonFiniteError
from nanwatch.session.api import Watch, watch
from support.stand_in_device import StandIn, stand_in
from support.toys import names

pytestmark = pytest.mark.skipif(_extension.C is None, reason="the Python recorder waits for each row")
INF = float("inf")
REPLAYS = 8  # GraphRows::kReplays


class Static(nn.Module):
    """Writes its input times its weight into memory that stays, as a graph does."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]), requires_grad=False)
        self.output = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.mul(x, self.weight, out=self.output)


class Graph:
    """A model of two parts that was captured once, and can be replayed."""

    def __init__(self, device: StandIn, **options: Any) -> None:
        self.device = device
        self.model = nn.Sequential(Static(2.0), Static(3.0))
        self.x = torch.ones(4)
        self.w: Watch = watch(self.model, **options)
        device.capturing = True
        self.model(self.x)
        device.capturing = False

    def replay(self, value: float, *, until: int | None = None) -> None:
        """Do `x.fill_(value)` and then `graph.replay()`."""
        self.x.fill_(value)
        first, second = self.model
        torch.mul(self.x, first.weight, out=first.output)
        torch.mul(first.output, second.weight, out=second.output)
        self.device.replay(until)


def outputs(w: Watch) -> list[tuple[int, str, Any]]:
    """Batch, module and the maximum of the output of each frame."""
    return [(f.batch, f.name, f.records[-1].abs_max) for f in w.frames]


def test_each_replay_is_a_batch_with_frames_of_its_own() -> None:
    """A capture leaves no frame; each replay leaves those of the calls, with the values that it computed."""
    with stand_in() as device:
        graph = Graph(device, check="async")
        assert device.waits == 0
        assert graph.w.frames == ()
        graph.replay(1.0)
        graph.replay(5.0)
        graph.w.report()
        assert outputs(graph.w) == [
            *((1, "0", 2.0), (1, "1", 6.0), (1, "", 6.0)),
            *((2, "0", 10.0), (2, "1", 30.0), (2, "", 30.0)),
        ]
        assert graph.w.batch == 2
        graph.w.stop()


def test_weights_are_read_in_every_replay() -> None:
    """A weight changed by an optimizer, in the same graph or outside, has its new values in the next replay."""
    with stand_in() as device:
        model_before = Graph(device)
        w = model_before.w
        model_before.replay(1.0)
        model_before.model[0].weight.data.fill_(7.0)
        model_before.replay(1.0)
        w.stop()
    weights = [f.records[0].abs_max for f in w.frames if f.name == "0"]
    assert weights == [2.0, 7.0]


def test_rows_of_a_graph_are_no_rows_of_a_call() -> None:
    """Before and after the capture the same tensors are read for the calls, and hits stay among each other."""
    with stand_in() as device:
        model = nn.Sequential(Static(2.0), Static(3.0))
        x = torch.ones(4)
        with watch(model, check="batch", _verify_hits=True) as w:
            model(x)
            device.capturing = True
            model(x)
            device.capturing = False
            model(x)
            assert names(w) == [(batch, name) for batch in (0, 2) for name in ("0", "1", "")]
            assert all(r.isfinite for f in w.frames for r in f.records)
    assert w.counters["stale_hits"] == 0


@pytest.mark.parametrize("check", ["auto", "module", "batch", "async"])
def test_a_fault_in_a_replay_is_told_by_the_next_look(check: Any) -> None:
    """The finding names the replay, the module and the element; later replays are not mixed in."""
    with stand_in() as device:
        graph = Graph(device, check=check)
        graph.replay(1.0)
        graph.x.fill_(1.0)
        graph.model[1].weight.data.fill_(INF)
        graph.replay(1.0)
        graph.model[1].weight.data.fill_(3.0)
        graph.replay(1.0)
        with pytest.raises(NonFiniteError) as error:
            graph.w.look()
        report = error.value.report
        assert report.finding is not None
        assert (report.finding.batch, report.finding.module, report.finding.label) == (2, "1", "weight")
        assert [(f.batch, f.name) for f in report.frames] == [
            *((1, name) for name in ("0", "1", "")),
            *((2, name) for name in ("0", "1")),
        ]
        assert "it was over when its rows came" in " ".join(report.finding.remarks)
        graph.w.stop()
        assert graph.w.batch == 3


def test_data_that_was_bad_before_the_replay_is_called_so() -> None:
    """The inputs of a replay are judged like the inputs of a call."""
    with stand_in() as device:
        graph = Graph(device, on_nonfinite="record")
        graph.replay(INF)
        graph.w.look()
        finding = graph.w.report().finding
        graph.w.stop()
    assert finding is not None
    assert (finding.origin, finding.label) == ("data", "input[0]")


def test_a_replay_under_way_is_not_told() -> None:
    """Until its last kernel has run a replay has no frames; those before it have theirs."""
    with stand_in() as device:
        graph = Graph(device, check="async")
        graph.replay(1.0)
        for until in range(len(device._graph)):
            graph.replay(2.0, until=until)
        graph.w.report()
        assert {f.batch for f in graph.w.frames} <= {1}
        graph.w.stop()


def test_more_replays_than_are_kept_are_said_to_be_missing() -> None:
    """The latest are there; a warning says how many were not seen, and their numbers are left out."""
    with stand_in() as device:
        graph = Graph(device, max_frames=1000)
        for number in range(1, REPLAYS + 4):
            graph.replay(float(number))
        with pytest.warns(RuntimeWarning, match="3 replays of a CUDA graph were not seen"):
            graph.w.look()
        expected = [(number, "", 6.0 * number) for number in range(4, REPLAYS + 4)]
        assert [one for one in outputs(graph.w) if one[1] == ""] == expected
        graph.w.stop()


def test_the_next_call_and_the_step_of_an_optimizer_look() -> None:
    """Replays are told in the order in which they came, before what follows them."""
    with stand_in() as device:
        graph = Graph(device)
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
        graph.replay(1.0)
        optimizer.step()
        assert {f.batch for f in graph.w.frames} == {1}
        graph.replay(2.0)
        graph.model(graph.x)
        assert [one for one in outputs(graph.w) if one[1] == ""] == [
            (1, "", 6.0),
            (2, "", 12.0),
            (3, "", 12.0),
        ]
        graph.w.stop()


def test_replays_while_it_is_paused_are_not_counted() -> None:
    """Replays before pause() and after resume() are batches."""
    with stand_in() as device:
        graph = Graph(device)
        graph.replay(1.0)
        graph.w.pause()
        graph.replay(2.0)
        graph.w.resume()
        graph.replay(3.0)
        graph.w.stop()
        graph.replay(4.0)
        graph.w.report()
    assert [one for one in outputs(graph.w) if one[1] == ""] == [(1, "", 6.0), (2, "", 18.0)]


def test_two_captures_of_a_model_are_two_graphs() -> None:
    """Each has rows of its own, and replays of one do not count for the other."""
    with stand_in() as device:
        graph = Graph(device)
        first, device._graph = device._graph, []
        device.capturing = True
        graph.model(graph.x)
        device.capturing = False
        second = device._graph
        for operations in (first, second, first):
            for operation in operations:
                operation()
        graph.w.look()
        assert [batch for batch, name in names(graph.w) if name == ""] == [2, 3, 4]
        graph.w.stop()


def test_a_capture_that_fails_leaves_nothing() -> None:
    """A forward that raises while it is captured has no graph, and the next batch is whole."""

    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if device.capturing:
                raise RuntimeError("not permitted when stream is capturing")
            return x

    with stand_in() as device:
        model = nn.Sequential(Static(2.0), Fails())
        with watch(model) as w:
            device.capturing = True
            with pytest.raises(RuntimeError, match="not permitted"):
                model(torch.ones(4))
            device.capturing = False
            model(torch.ones(4))
            assert names(w) == [(1, "0"), (1, "1"), (1, "")]


def test_a_part_of_a_batch_that_is_captured_is_not_read() -> None:
    """Where the batch began outside the capture nothing in it goes into the graph: its rows are read another way."""

    class Captures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.outside, self.inside = Static(2.0), Static(3.0)

        def forward(self, x: Tensor) -> Tensor:
            x = self.outside(x)
            device.capturing = True
            x = self.inside(x)
            device.capturing = False
            return x

    with stand_in() as device:
        model = Captures()
        with watch(model) as w:
            model(torch.ones(4))
        assert device._graph == []
    assert names(w) == [(0, "outside"), (0, "inside"), (0, "")]
