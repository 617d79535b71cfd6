"""Every order of watching, compiling, stopping and pausing; and other things a compiled program does meanwhile."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.instrumentation import compiled
from support.recorders import needs_native
from support.toys import Scale, names
from support.watching import watch

pytestmark = needs_native


class Model(nn.Module):
    """Model in a class of its own: the interpreter makes its call, and only the inside is compiled."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x)))


def test_a_compiled_model_and_its_watch_are_freed() -> None:
    """The compiler keeps neither the model nor the recorder."""
    model = Model()
    w = watch(model)
    call = torch.compile(model, backend="aot_eager", fullgraph=True)
    call(torch.randn(2, 3))
    references = [weakref.ref(model), weakref.ref(w)]
    w.stop()
    del model, w, call
    torch._dynamo.reset()
    gc.collect()
    assert [reference() for reference in references] == [None, None]


def test_a_model_that_was_called_before_is_watched() -> None:
    """While another model was watched: its graph is made anew at the first watch, and serves the next one."""
    model, x = Model(), torch.randn(2, 3)
    call = torch.compile(model, backend="eager", fullgraph=True)
    with watch(nn.ReLU()):
        call(x)
    for may_compile in (True, False):
        with watch(model) as w, torch._dynamo.config.patch(error_on_recompile=not may_compile):
            call(x)
        assert names(w) == [(0, "first"), (0, "last"), (0, "")]


def test_what_the_model_does_not_use_is_not_guarded_on() -> None:
    """Numbers and objects that a module is only given make no new graph when they change."""

    class Given(nn.Module):
        def forward(self, x: Tensor, *rest: Any, **named: Any) -> Tensor:
            return x * 2

    model = Given()
    call = torch.compile(lambda x, y, z: model(x, y, z=z), backend="eager", fullgraph=True)
    with watch(model) as w:
        call(torch.ones(1), 0, {"a": 0.5})
        with torch._dynamo.config.patch(error_on_recompile=True):
            for step in range(1, 5):
                call(torch.ones(1), step, {"a": step / 3})
    assert len(w.frames) == 5


def test_hooks_and_transforms_inside_a_graph() -> None:
    """A frame shows the output after the user's hooks; inside vmap nothing is looked at and the result is right."""
    model = nn.Sequential(Scale(2.0), Scale(3.0))
    model[0].register_forward_hook(lambda module, args, output: output + 1)
    x = torch.ones(3, 2)
    with watch(model) as w:
        torch.compile(model, backend="aot_eager", fullgraph=True)(x)
        mapped = torch.compile(lambda x: torch.vmap(model)(x), backend="aot_eager", fullgraph=True)(x)
    assert [frame.records[-1].abs_max for frame in w.frames] == [3.0, 9.0, 9.0]
    assert torch.equal(mapped, torch.full((3, 2), 9.0))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_in_a_graph_looks_once(reentrant: bool) -> None:
    """A checkpointed part of a graph has the frames of its forward, once, and the gradients it had."""
    from torch.utils.checkpoint import checkpoint

    layers = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    x = torch.ones(1, 2)

    def forward(x: Tensor) -> Tensor:
        return checkpoint(layers, x, use_reentrant=reentrant).sum()

    layers(x).sum().backward()
    expected = [p.grad for p in layers.parameters()]
    layers.zero_grad()
    with watch(layers) as w:
        torch.compile(forward, backend="aot_eager", fullgraph=True)(x).backward()
    assert names(w) == [(0, "0"), (0, "1"), (0, "")]
    assert all(torch.equal(p.grad, e) for p, e in zip(layers.parameters(), expected, strict=True))


def test_an_unknown_dynamo_costs_the_frames_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """When something inside Dynamo is not as expected there is one warning, and the model compiles and runs."""

    def broken(*_: Any) -> Any:
        raise AttributeError("no such thing")

    monkeypatch.setattr(compiled, "_site", broken)
    monkeypatch.setattr(compiled, "_warned", False)
    model, x = Model(), torch.randn(2, 3)
    with watch(model) as w, pytest.warns(RuntimeWarning, match="inside torch.compile are not seen") as caught:
        output = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert len(caught) == 1
    assert torch.equal(output, Model()(x))
    assert names(w) == [(0, "")]


_PROGRAM = """
import sys
import torch
from torch import nn
class Model(nn.Sequential):
    def forward(self, x):
        return super().forward(x) * 2
plain, own, inside = nn.Sequential(nn.Identity()), Model(nn.Identity()), Model(nn.Identity())
def function(x):
    return inside(x) + 1
compile_all = lambda: [torch.compile(one, backend="eager") for one in (plain, own, function)]
calls = compile_all() if {compiled_first} else []
for call in calls:
    call(torch.ones(1))
import nanwatch
watches = [nanwatch.watch(one) for one in (plain, own, inside)]
assert ("torch._dynamo" in sys.modules) == {compiled_first}
calls = calls or compile_all()
for call in calls:
    call(torch.ones(1))
print([[frame.name for frame in w.frames] for w in watches])
assert not any(getattr(finder, "_name", "") == "torch._dynamo" for finder in sys.meta_path)
"""


@pytest.mark.slow
@pytest.mark.parametrize("compiled_first", [False, True])
def test_dynamo_may_come_before_or_after_the_first_watch(compiled_first: bool) -> None:
    """A watch does not import Dynamo, changes it when it comes, and has all that was compiled before compiled anew."""
    program = _PROGRAM.format(compiled_first=compiled_first)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[['0', ''], ['0', ''], ['0', '']]"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_the_operator_keeps_the_rules(device: str) -> None:
    """Schema, fake and behaviour under AOTAutograd agree; without a watch of that module it only counts."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    x = torch.randn(3, 2, device=device, requires_grad=True)
    sequence = torch.zeros(1, dtype=torch.int64)
    site = torch.tensor([0])
    torch.library.opcheck(compiled.record_, (sequence, site, None, "", [x]))
    torch.library.opcheck(compiled.record_, (sequence, site, site, "Linear\not output", [x]))
