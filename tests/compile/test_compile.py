"""Calls inside torch.compile have the frames they have in the interpreter, and change nothing else."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.records.record import Frame, Note
from nanwatch.report.report import NonFiniteError
from nanwatch.session.watch import Watch
from support.architectures import built, inputs_of
from support.recorders import needs_native
from support.toys import Does, Scale, names
from support.watching import watch

pytestmark = needs_native
BACKENDS = ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)]


@dataclass
class Pair:
    """An output that pytree does not know."""

    first: Tensor
    rest: list[Tensor | None]


class Split(nn.Module):
    """Takes a keyword, a number and None, has a buffer, and returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.tensor([0.5, -2.0]))
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: Tensor, *, factor: float, extra: Tensor | None = None) -> Pair:
        return Pair(x * factor + self.offset, [x, extra])


class Join(nn.Module):
    """Takes the dataclass, returns a dictionary in a tuple."""

    def forward(self, pair: Pair, scale: int) -> tuple[dict[str, Tensor], int]:
        return {"sum": pair.first + pair.rest[0], "odd key!": pair.first * scale}, scale


class Nested(nn.Module):
    """One layer called twice, containers between modules, and parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.split = Split()
        self.join = Join()
        self.bias = nn.Parameter(torch.tensor([0.25, -0.75]))

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.layer(self.layer(x))
        joined, _ = self.join(self.split(x, factor=1.5), 3)
        return {"states": (joined["sum"] + self.bias, [joined["odd key!"]]), "none": None}


def _nested() -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    torch.manual_seed(0)
    return Nested(), lambda seed: {"x": torch.randn(3, 2, generator=torch.Generator().manual_seed(seed))}


def _real(name: str) -> tuple[nn.Module, Callable[[int], dict[str, Any]]]:
    model = copy.deepcopy(built(name)).eval()  # Inductor draws other numbers for a dropout
    model.loss_type = "ForCausalLM"  # else transformers logs that it is not set, which breaks any graph
    return model, lambda seed: inputs_of(name, seed)


MODELS = {"nested": _nested} | {name: lambda name=name: _real(name) for name in ("llama", "gpt2", "t5")}


def _run(
    model: nn.Module, call: Callable[..., Any], inputs: Callable[[int], dict[str, Any]], batches: int = 5
) -> Watch:
    """Watches `model` while `call` is made, and holds that only the first batch compiles."""
    with watch(model, max_frames=10_000) as w:
        call(**inputs(0))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for seed in range(1, batches):
                call(**inputs(seed))
    return w


def _facts(frame: Frame) -> tuple[Any, ...]:
    records = [(r.label, r.role, r.shape, r.dtype, r.isfinite, r.note) for r in frame.records]
    return frame.batch, frame.name, frame.class_name, records


def _ranges(w: Watch) -> list[float]:
    return [end for f in w.frames for r in f.records if r.isfinite for end in (r.abs_min, r.abs_max)]


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("nested", "eager"),
        ("nested", "aot_eager"),
        # Inductor compiles all that the other backends do. Each backend takes 5 to 15 s for a real model.
        *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in MODELS),
    ],
)
def test_frames_are_those_of_the_interpreter(name: str, backend: str) -> None:
    """Five batches in one graph give the names, labels, shapes and dtypes of eager frames, and their ranges."""
    model, inputs = MODELS[name]()
    eager = _run(model, model, inputs)
    compiled = _run(model, torch.compile(model, backend=backend, fullgraph=True), inputs)
    assert list(map(_facts, compiled.frames)) == list(map(_facts, eager.frames))
    if backend == "inductor":  # which computes in another order
        assert _ranges(compiled) == pytest.approx(_ranges(eager), rel=1e-3, abs=1e-5)
    else:
        assert compiled.frames == eager.frames
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


class Node:
    """Node of a tree, with its parent."""

    def __init__(self, value: Tensor, parent: Node | None = None) -> None:
        self.value = value
        self.children: list[Node] = []
        if parent is not None:
            self.parent = parent
            parent.children.append(self)


class Tree(nn.Module):
    """Returns a tree of objects and a dictionary whose keys are no constants."""

    def forward(self, x: Tensor) -> tuple[Node, dict[nn.Module, Tensor]]:
        root = Node(x)
        for power in (2, 3):
            Node(x**power, root)
        return root, {self: x + 1, self.get_submodule(""): x + 2}


def test_objects_and_keys_of_any_class_lose_no_value() -> None:
    """An object is entered once, as two that refer to their parent have 2^16 paths to the limit of depth."""
    model = Does(lambda tree, x: tree(x)[0].children[1].value, Tree())
    eager, compiled = (
        _run(model, call, lambda _: {"x": torch.ones(2)}, 1)
        for call in (model, torch.compile(model, backend="eager", fullgraph=True))
    )
    assert _ranges(compiled) == _ranges(eager)
    notes = [[record.note for frame in w.frames for record in frame.records] for w in (eager, compiled)]
    assert notes[0] == notes[1]
    assert Note("not_checked", "contains itself") in notes[0]


def test_eager_and_compiled_calls_keep_their_order() -> None:
    """A graph break in the middle: frames of compiled and interpreted calls come in the order of the calls."""
    breaks = Does(lambda x: (torch._dynamo.graph_break(), x + 1)[1])
    model = nn.Sequential(Scale(2.0), nn.Sequential(Scale(3.0), breaks, Scale(4.0)), Scale(5.0))
    calls = model, torch.compile(model, backend="eager")
    eager, compiled = (_run(model, call, lambda _: {"input": torch.ones(2)}) for call in calls)
    assert compiled.frames == eager.frames


def test_a_tensor_without_values_to_read_says_so() -> None:
    """A subclass and a sparse tensor inside a graph are named as not checked, and the graph is whole."""
    model = Does(lambda x, other: x * 2)
    with watch(model) as w:
        step = torch.compile(lambda x, y: model(x, y), backend="eager", fullgraph=True)
        step(torch.ones(2), torch.ones(2).to_sparse())
    assert w.frames[0].records[1].note == Note("not_checked", "in compiled code only plain tensors are read")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("inlined", "check"), [(False, "module"), (True, "batch")])
def test_a_fault_is_reported_as_in_the_interpreter(backend: str, inlined: bool, check: Any) -> None:
    """NonFiniteError comes out of the compiled call, and its report is that of the interpreter to the letter."""
    texts = []
    for compiled in (False, True):
        model = nn.Sequential(Scale(2.0), nn.Sequential(nn.ReLU(), Does(torch.log)), Scale(3.0))
        call: Any = (lambda x, m=model: m(x)) if inlined else model
        if compiled:
            call = torch.compile(call, backend=backend, fullgraph=True)
        with watch(model, act_at=check, rerun=False) as w:
            call(torch.ones(2))
            with pytest.raises(NonFiniteError) as error:
                call(torch.tensor([1.0, -1.0]))
            call(torch.ones(2))
        ended = [batch for batch, name in names(w) if name == ""]
        assert ended == ([0, 1, 2] if check == "batch" else [0, 2])
        texts.append(error.value.report.to_json())
    assert texts[0] == texts[1]


@pytest.mark.parametrize("inlined", [False, True])
def test_a_compiled_batch_is_examined_where_its_arguments_are_known(inlined: bool) -> None:
    """The re-run is made operation by operation; a call that lies in the graph says that it was not run again."""
    model = Does(torch.log)
    with watch(model) as w:
        compiled = torch.compile((lambda x: model(x)) if inlined else model, backend="eager", fullgraph=True)
        compiled(torch.ones(2))
        with pytest.raises(NonFiniteError):
            compiled(torch.zeros(2))
    finding = w.report().finding
    if inlined:
        assert finding.operation is None
        assert "compiled" in finding.remarks[0]
    else:
        assert finding.operation == "aten.log.default"
        assert finding.transient is False


def test_after_an_error_in_the_graph_the_next_batch_is_whole() -> None:
    """An operator that raises in the middle of a graph ends its batch, for the graph and for the interpreter."""
    model = nn.Sequential(nn.Embedding(4, 2), Scale(2.0))
    with watch(model) as w:
        call = torch.compile(lambda x: model(x), backend="eager", fullgraph=True)
        call(torch.tensor([1]))
        for following in (call, model):
            with pytest.raises(IndexError):
                call(torch.tensor([7]))
            following(torch.tensor([2]))
    whole = [(batch, name) for batch in (0, 2, 4) for name in ("0", "1", "")]
    assert names(w) == whole


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("nested", "aot_eager"),
        *(pytest.param(name, "inductor", marks=pytest.mark.slow) for name in ("nested", "gpt2")),
    ],
)
def test_training_is_bit_for_bit_that_of_an_unwatched_model(name: str, backend: str) -> None:
    """Three compiled steps give the losses and gradients of the same backend without a watch."""

    def train(watched: bool) -> list[Tensor]:
        torch._dynamo.reset()
        model, inputs = MODELS[name]()
        w = watch(model, enabled=watched)
        call = torch.compile(model, backend=backend, fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        kept = []
        for seed in range(3):
            output = call(**inputs(seed))
            loss = output["states"][0].square().sum() if name == "nested" else output.loss
            loss.backward()
            kept += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            optimizer.step()
            optimizer.zero_grad()
        assert w.batch == (2 if watched else None)
        return kept

    for seen, expected in zip(train(watched=True), train(watched=False), strict=True):
        assert torch.equal(seen, expected)
