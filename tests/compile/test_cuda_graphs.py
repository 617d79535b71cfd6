"""Compiled code that is captured into CUDA graphs, as mode="reduce-overhead" asks: what Inductor is given to capture,
and the frames of the replays over a stand-in for the device.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config

from nanwatch.instrumentation.compile import dynamo
from nanwatch.numerics import _extension
from nanwatch.report.report import NonFiniteError
from nanwatch.session.api import Watch, watch
from support.paths import ROOT, SCRIPTS
from support.processes import environment
from support.stand_in_device import StandIn, stand_in

pytestmark = pytest.mark.skipif(_extension.C is None, reason="the Python recorder is never captured")
INF = float("inf")


class Times(nn.Module):
    """Multiplies by its weight."""

    def __init__(self, weight: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([weight]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Trees:
    """Stand-in for Inductor's CUDA graph trees, which run a graph, then capture it and replay that, then replay it.

    Operators on the host are run by themselves each time. The device reads memory, so every value of the capture keeps
    its place, and a replay computes into it.
    """

    def __init__(self, graph: Any, device: StandIn) -> None:
        self.graph, self.device = graph.graph, device
        self.calls = 0
        self.memory: dict[Any, Any] = {}

    def __call__(self, *inputs: Tensor) -> Any:
        """One call of the compiled code."""
        self.calls += 1
        given = dict(zip((n for n in self.graph.nodes if n.op == "placeholder"), inputs, strict=True))
        for node in self.graph.nodes:
            if self.is_ours(node) and "poll_" in str(node.target):
                node.target(*self.filled(node, given))
        if self.calls == 1:
            return self.run(given, dict(given))
        if self.calls == 2:
            self.memory = {node: x if is_static(x) else x.clone() for node, x in given.items()}
            self.device.capturing = True
            self.run(given, self.memory)
            self.device.capturing = False
        for node, x in given.items():
            self.memory[node].copy_(x)
        result = self.replay()
        self.device.run()  # what is before it in the stream
        self.device.replay()
        return result

    @staticmethod
    def is_ours(node: Any) -> bool:
        """Return whether the node is an operator of nanwatch."""
        return str(node.target).startswith("nanwatch.")

    @staticmethod
    def filled(node: Any, values: dict[Any, Any]) -> Any:
        """The node's arguments."""
        return torch.fx.node.map_arg(node.args, values.__getitem__)

    def run(self, given: dict[Any, Any], values: dict[Any, Any]) -> Any:
        """All but what runs by itself."""
        for node in self.graph.nodes:
            if node.op == "call_function" and "poll_" not in str(node.target):
                values[node] = node.target(*self.filled(node, values))
        return self.filled(self.graph.output_node(), values)[0]

    def replay(self) -> Any:
        """Compute again, in the same memory, the results of the captured kernels."""
        for node in self.graph.nodes:
            if node.op == "call_function" and not self.is_ours(node):
                self.memory[node].copy_(node.target(*self.filled(node, self.memory)))
        return self.filled(self.graph.output_node(), self.memory)[0]


def is_static(x: Tensor) -> bool:
    """Return whether Dynamo marks it as static."""
    return getattr(x, "_dynamo_static_input_type", None) is not None


class Compiled:
    """A watched model of two parts and compiled code that calls it."""

    def __init__(self, device: StandIn, **options: Any) -> None:
        self.model = nn.Sequential(Times(2.0), Times(3.0))
        self.w: Watch = watch(self.model, **options)
        self.trees: list[Trees] = []

        def backend(graph: Any, inputs: list[Tensor]) -> Callable[..., Any]:
            self.trees.append(Trees(graph, device))
            return self.trees[-1]

        self.step = torch.compile(lambda x: self.model(x), backend=backend, fullgraph=True)

    def captured(self) -> Compiled:
        """After a call that warms up and one that is captured and replayed."""
        for value in (1.0, 2.0):
            self.call(value)
        return self

    def call(self, value: float) -> Tensor:
        """One call with this number in all places."""
        return self.step(torch.full((4,), value))


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Patch torch so that graphs are captured as on a GPU with mode="reduce-overhead"."""
    torch._dynamo.reset()
    monkeypatch.setattr(dynamo, "DEVICE_TYPE", "cpu")
    monkeypatch.setattr(dynamo, "_setting", lambda *_: True)  # which is Inductor's
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def outputs(w: Watch) -> list[tuple[int, str, Any]]:
    """Batch, module and the maximum of the output of each frame."""
    return [(f.batch, f.name, f.records[-1].abs_max) for f in w.frames]


def frames_of(batch: int, value: float) -> list[tuple[int, str, Any]]:
    """Return the expected frames of a batch."""
    return [(batch, "0", 2 * value), (batch, "1", 6 * value), (batch, "", 6 * value)]


@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("check", ["auto", "module", "batch", "async"])
def test_each_replay_has_its_frames(check: Any) -> None:
    """The first call is seen as it runs, the capture has a number and no frames, each replay is a batch."""
    with stand_in() as device:
        compiled = Compiled(device, check=check)
        for value in (1.0, 2.0, 3.0, 4.0):
            assert compiled.call(value)[0] == 6 * value
        compiled.w.stop()
    (tree,) = compiled.trees
    assert tree.calls == 4
    assert outputs(compiled.w) == [
        *frames_of(0, 1.0),
        *(one for batch, value in ((2, 2.0), (3, 3.0), (4, 4.0)) for one in frames_of(batch, value)),
    ]


@pytest.mark.usefixtures("captures")
def test_in_the_capture_nothing_waits_and_no_row_is_the_hosts_choice() -> None:
    """The capture holds the reads of the calls and two counts; the stand-in refuses anything else."""
    with stand_in() as device:
        compiled = Compiled(device, check="async")
        compiled.call(1.0)
        device.run()
        waits = device.waits
        compiled.call(2.0)
        assert device.waits == waits
        # Weight, input and output of each part, both ends of the whole and what it was given, and the count at
        # either end: what lies between modules is read anew, as compiled code uses its memory again.
        assert len(device._graph) == 3 + 3 + 2 + 1 + 2
        compiled.w.stop()


@pytest.mark.usefixtures("captures")
def test_a_fault_in_a_replay_is_raised_by_the_next_call() -> None:
    """`poll_` stands outside of the graph: the next call of the compiled code tells, before it runs."""
    with stand_in() as device:
        compiled = Compiled(device).captured()
        compiled.model[1].weight.fill_(INF)
        compiled.call(3.0)
        compiled.model[1].weight.fill_(3.0)
        with pytest.raises(NonFiniteError) as error:
            compiled.call(4.0)
        finding = error.value.report.finding
        assert finding is not None
        assert (finding.batch, finding.module, finding.label) == (3, "1", "weight")
        assert compiled.call(5.0)[0] == 30.0
        compiled.w.stop()
    assert outputs(compiled.w)[-3:] == frames_of(4, 5.0)


@pytest.mark.usefixtures("captures")
def test_a_watch_that_stops_or_rests_leaves_the_graph_alone() -> None:
    """Replays while it is paused are not counted; after stop() nothing is told, and the numbers are the model's."""
    with stand_in() as device:
        compiled = Compiled(device).captured()
        compiled.w.pause()
        compiled.call(3.0)
        compiled.w.resume()
        compiled.call(4.0)
        compiled.w.stop()
        assert compiled.call(5.0)[0] == 30.0
    assert [one for one in outputs(compiled.w) if one[1] == ""] == [
        (0, "", 6.0),
        (2, "", 12.0),
        (3, "", 24.0),
    ]


@pytest.mark.usefixtures("captures")
def test_a_batch_in_two_captures_is_said_to_be_lost() -> None:
    """Where Inductor has to cut inside of a batch its replays cannot be told apart: one warning, no frames."""
    with stand_in() as device, watch(model := nn.Sequential(Times(2.0), Captures(device))) as w:
        device.capturing = True
        with pytest.warns(RuntimeWarning, match="not captured into one CUDA graph as a whole"):
            model(torch.ones(4))
        device.capturing = False
        device.replay()
        w.look()
        assert w.frames == ()
        model(torch.ones(4))
        assert {f.batch for f in w.frames} == {1}


class Captures(nn.Module):
    """Ends the capture that it is in and begins another."""

    def __init__(self, device: StandIn) -> None:
        super().__init__()
        self.device = device
        self.part = Times(3.0)

    def forward(self, x: Tensor) -> Tensor:
        if self.device.capturing:
            self.device.capture += 1
        return self.part(x)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ({"mode": "reduce-overhead"}, True),
        ({"mode": "max-autotune"}, True),
        ({"options": {"triton.cudagraphs": True}}, True),
        ({"mode": "max-autotune-no-cudagraphs"}, False),
        ({}, False),
        ({"options": {"triton.cudagraphs": True, "graph_partition": False}}, False),
        ({"backend": "aot_eager"}, False),
    ],
)
def test_what_torch_compile_was_told_decides(
    told: dict[str, Any], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Operators for a capture are put where Inductor will capture, and on the CPU it never does."""
    found = []

    def captured_on(tx: Any, recorder: Any, devices: Any) -> None:
        found.append(all(dynamo._setting(tx, name) for name in dynamo._NEEDED))

    monkeypatch.setattr("nanwatch.instrumentation.compile.dynamo._captured_on", captured_on)
    torch._dynamo.reset()
    model = nn.Sequential(Times(2.0))
    # Settings that are made for all backends must not reach another backend.
    everywhere = {"triton.cudagraphs": "backend" in told}
    with watch(model) as w, torch.no_grad(), config.patch(everywhere):
        torch.compile(model, **told)(torch.ones(4))
        assert [f.name for f in w.frames] == ["0", ""]
    assert found == [expected]


def test_without_a_gpu_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of the host that is compiled with reduce-overhead has no operator for captures in its graph."""
    graphs = []

    def backend(graph: Any, inputs: list[Tensor]) -> Any:
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    torch._dynamo.reset()
    model = nn.Sequential(Times(2.0))
    monkeypatch.setattr(dynamo, "_setting", lambda *_: True)
    with watch(model), torch.no_grad():
        torch.compile(model, backend=backend)(torch.ones(4))
    assert [name.partition(".")[2] for name in graphs[0] if name.startswith("nanwatch")] == [
        *("begin_.default", "record_.default", "record_.default")
    ]


@pytest.mark.slow
def test_inductor_captures_a_watched_batch_in_one_piece(tmp_path: Path) -> None:
    """Its own plan for a GPU: one operator on the host, then all in one graph that writes only to memory that stays.

    Where the outermost call is not in the trace, as when torch.compile is given a module whose forward it compiles
    alone, the batch begins outside: then the graph is cut at each call, and none of the operators is captured.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ was not found: there is no guard for a device that is not there")
    home, library = Path(torch.__file__).parent, tmp_path / "guard.so"
    flags = ["-std=c++20", "-shared", "-fPIC", f"-I{home / 'include'}"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    source = str(ROOT / "tests/native/cuda_host/guard.cpp")
    subprocess.run([compiler, *flags, source, f"-L{home / 'lib'}", "-lc10", "-o", str(library)], check=True)
    script = SCRIPTS / "inductor_partitions.py"
    command = [sys.executable, str(script), str(library)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
    assert done.returncode == 0, done.stderr
    plans = json.loads(done.stdout)

    ((only,), whole, called) = plans["unwatched"], plans["whole"], plans["called by a function"]
    assert only["captured"]
    assert only["written"] == 0
    for plan in (whole, called):
        outside, inside = plan
        assert not outside["captured"]
        assert outside["operators"] == ["nanwatch.poll_.default"]
        assert inside["captured"]
        assert inside["devices"] == ["cuda:0"]
        assert (inside["written"], inside["written_and_moving"]) == (1, 0)
    ours = [name for name in whole[1]["operators"] if name.startswith("nanwatch")]
    assert ours == ["nanwatch.begin_.default", *["nanwatch.record_.default"] * 4]
    assert [name for name in whole[1]["operators"] if name not in ours] == only["operators"]

    for part in plans["a forward alone"]:
        assert part["captured"] == (part["operators"] == ["kernel"])
