"""The recorder on a GPU: reports are those of the host, whoever waits; streams, devices, graphs and device errors."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.report.report import NonFiniteError
from support.processes import environment
from support.recorders import needs_cuda
from support.toys import Does, Scale
from support.watching import watch

pytestmark = needs_cuda
INF = float("inf")


class Masked(nn.Module):
    """Exact arithmetic, so that both devices compute the same numbers; takes a mask that is noted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scale(2.0), Scale(4.0)
        self.weight = nn.Parameter(torch.arange(1.0, 5.0))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.second(self.first(x) * self.weight)
        return torch.where(mask == 0, x, 0.5)


def run(device: str, plant: float, **options: Any) -> tuple[str, str]:
    """Report and frames of three batches; in the second the first part makes `plant`."""
    model = Masked().to(device)
    x = torch.ones(4, 4, device=device)
    mask = torch.full((4, 4), -INF, device=device).triu(1)
    with watch(model, on_nonfinite="record", max_frames=100, **options) as w:
        for batch in range(3):
            model.first.factor = plant if batch == 1 else 2.0
            model(x, mask)
    return w.report().to_json(), repr(w.frames)


@pytest.mark.parametrize("check", ["auto", "module", "batch"])
@pytest.mark.parametrize("plant", [2.0, INF, float("nan")])
def test_the_report_is_that_of_the_host(check: Any, plant: float) -> None:
    """Counts, index, mask and origin included."""
    assert run("cuda", plant, act_at=check) == run("cpu", plant)


def test_many_batches_with_reused_memory() -> None:
    """A few hundred batches whose activations are freed at once: each frame has its own batch's numbers."""
    model = nn.Sequential(Scale(2.0), Scale(3.0))
    with watch(model, max_frames=10_000, on_nonfinite="record") as w:
        for batch in range(300):
            model(torch.full((1 << 16,), float(batch), device="cuda"))
    assert [f.records[-1].abs_max for f in w.frames if f.name == ""] == [6.0 * n for n in range(300)]


def test_a_side_stream() -> None:
    """Calls on another stream have their rows, and the batch waits for both."""
    side = torch.cuda.Stream()

    def forward(part: nn.Module, x: Tensor) -> Tensor:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = part(x)
        torch.cuda.current_stream().wait_stream(side)
        y.record_stream(torch.cuda.current_stream())
        return y + 1

    model = Does(forward, Scale(2.0))
    with watch(model) as w:
        model(torch.ones(1 << 20, device="cuda"))
    assert [f.records[-1].abs_max for f in w.frames] == [2.0, 3.0]


def test_replays_of_a_graph() -> None:
    """The capture has nothing of the watch in it, and a report says that its replays are not seen."""
    model = nn.Sequential(Scale(2.0), nn.Linear(4, 4)).cuda()
    x = torch.ones(2, 4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), watch(model) as w:
        model(x)
        with torch.cuda.graph(graph):
            model(x)
        for _ in range(3):
            graph.replay()
        assert w.batch == 1
        assert w.report().to_text().count("captured into a CUDA graph") == 1


def test_reduce_overhead_is_cut_at_watched_calls() -> None:
    """Each call has its numbers, and a fault is raised by its own batch."""
    model = nn.Sequential(Scale(2.0), nn.Linear(4, 4)).cuda()
    with torch.no_grad():
        model[1].weight.copy_(torch.eye(4))
        model[1].bias.zero_()
    with torch.no_grad(), watch(model, max_frames=100, rerun=False) as w:
        step = torch.compile(lambda x: model(x), mode="reduce-overhead", fullgraph=True)
        for value in (1.0, 3.0, 5.0, 7.0):
            torch.compiler.cudagraph_mark_step_begin()
            assert step(torch.full((2, 4), value, device="cuda"))[0, 0].item() == 2 * value
        assert [f.records[-1].abs_max for f in w.frames if f.name == ""] == [2.0, 6.0, 10.0, 14.0]
        torch.compiler.cudagraph_mark_step_begin()
        with pytest.raises(NonFiniteError):
            step(torch.full((2, 4), INF, device="cuda"))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_a_model_over_two_devices() -> None:
    """Frames of both devices, in the order of the calls."""
    model = Does(lambda first, last, x: last(first(x).to("cuda:1")), Scale(2.0), Scale(3.0))
    with watch(model) as w:
        for _ in range(3):
            model(torch.ones(4, device="cuda:0"))
    assert [f.records[-1].abs_max for f in w.frames] == [2.0, 6.0, 6.0] * 3


ASSERTION = """
import torch
from torch import nn

import nanwatch

class Index(nn.Module):
    def forward(self, x):
        y = x[torch.tensor([99], device="cuda")]
        torch.cuda.synchronize()
        return y

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Index()).cuda()
w = nanwatch.watch(model)
try:
    model(torch.ones(2, 4, device="cuda"))
except RuntimeError as error:
    assert "assert" in str(error), error
else:
    raise SystemExit("no error")
try:
    w.stop()
finally:
    for frame in w.frames:
        print(frame.name, [record.isfinite for record in frame.records])
"""


def test_after_a_device_assertion_the_frames_are_there() -> None:
    """Rows written before the error can be read after it, though no device memory can."""
    done = subprocess.run(
        [sys.executable, "-c", ASSERTION], capture_output=True, text=True, env=environment(), timeout=300
    )
    assert done.stdout.splitlines()[:2] == ["0 [True, True, True, True]", "1 [True, True]"], done.stderr
