"""watch(gradients=True): what is seen of a backward, against torch.autograd.grad on graphs made at random."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nanwatch
from nanwatch.session.watch import Watch
from nanwatch.trace.trace_file import Trace
from support.gradient_models import Net, Spoiling, backward_frames, failing_backward, loss_of
from support.recorders import WITH_DEVICE, available, watched
from support.toys import Does, mlp

Seen = tuple[str, str, tuple[int, ...], float, float]  # module, label, shape, abs_min, abs_max


def seen(w: Watch) -> list[Seen]:
    records = [(frame.name, record) for frame in backward_frames(w) for record in frame.records]
    return [(name, r.label, r.shape, r.abs_min, r.abs_max) for name, r in records]  # type: ignore[misc]


# Random graphs


def expected(model: Net, x: Tensor) -> tuple[Counter[Seen], Counter[Seen]]:
    """The same by plain hooks of the forward and torch.autograd.grad: what must be seen, and what may be, too."""
    calls: list[tuple[str, nn.Module, list[tuple[str, Tensor]]]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if isinstance(output, Tensor):
                outputs = [("output", output)]
            else:
                items = output.items() if isinstance(output, dict) else enumerate(output)
                outputs = [(f"output[{i}]", one) for i, one in items]
            outputs = [(label, one) for label, one in outputs if not one.is_leaf]
            edges = {(id(one.grad_fn), one.output_nr) for _, one in outputs}
            inputs = [(f"input[{i}]", one) for i, one in enumerate(args)]
            inputs = [(k, x) for k, x in inputs if x.is_leaf or (id(x.grad_fn), x.output_nr) not in edges]
            if outputs:
                calls.append((name, module, [*inputs, *outputs]))

        return hook

    handles = [module.register_forward_hook(note(name)) for name, module in model.named_modules()]
    loss = loss_of(model(x))
    for handle in handles:
        handle.remove()
    tensors = [one for _, _, found in calls for _, one in found if one.requires_grad]
    modules = model.named_modules()
    owned = [(name, module, *x) for name, module in modules for x in module.named_parameters(recurse=False)]
    weights = [x for x in owned if x[-1].requires_grad]
    wanted = [*tensors, *(p for *_, p in weights)]
    gradients = torch.autograd.grad(loss, wanted, allow_unused=True) if wanted else ()
    by_id = {id(one): gradient for one, gradient in zip(wanted, gradients, strict=True)}
    reached = [
        (name, module, found)
        for name, module, found in calls
        if any(by_id.get(id(one)) is not None for label, one in found if label.startswith("output"))
    ]
    rows, loose = [], []
    for name, _, found in reached:
        behind = ancestors([one for label, one in found if label.startswith("output")])
        for label, one in found:
            if one.requires_grad and (gradient := by_id[id(one)]) is not None:
                # A tensor that no output was made from may have a gradient from elsewhere, before the call is reached.
                is_loose = label.startswith("input") and edge(one) not in behind
                (loose if is_loose else rows).append(row(name, label, gradient))
    called = {id(module) for _, module, _ in calls}
    rows += [
        row(name, label, by_id[id(p)])
        for name, module, label, p in weights
        if id(module) in called and by_id[id(p)] is not None
    ]
    return Counter(rows), Counter(loose)


def edge(x: Tensor) -> Any:
    """The node of the graph to which its gradient goes."""
    return torch.autograd.graph.get_gradient_edge(x).node


def ancestors(tensors: list[Tensor]) -> set[Any]:
    """All nodes that the gradients of these lead to."""
    left, found = [edge(x) for x in tensors if x.requires_grad], set()
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [following for following, _ in node.next_functions]
    return found


def row(name: str, label: str, gradient: Tensor | None) -> Seen:
    magnitude = gradient.detach().abs()
    return name, f"{label}.grad", tuple(gradient.shape), magnitude.min().item(), magnitude.max().item()


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), leaf=st.booleans())
def test_the_gradients_are_those_of_autograd(seed: int, leaf: bool) -> None:
    """Every gradient that exists has its record, with its range, and no other: both recorders, the same frames."""
    model = Net(seed)
    x = torch.randn(2, 4).requires_grad_(leaf)
    required, allowed = expected(model, x)
    found = {}
    for recorder in [recorder for recorder in ("native", "python") if recorder in available()]:
        with watched(model, recorder, gradients=True, max_frames=10_000, on_nonfinite="record") as w:
            loss_of(model(x)).backward()
            found[recorder] = backward_frames(w)
            found_rows = Counter(seen(w))
        assert required <= found_rows <= required + allowed
        assert all(r.role == "gradient" for frame in found[recorder] for r in frame.records)
    assert len({repr(frames) for frames in found.values()}) == 1


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), behind=st.booleans())
@example(seed=925, behind=True)
def test_the_module_that_spoils_a_gradient_is_found(seed: int, behind: bool) -> None:
    """One step spoils what goes through it: it produced the value, or its part received it, or both share a tensor."""
    findings = {}
    for recorder in available():
        model = Net(seed)
        model.steps[0] = Spoiling(model.steps[0], behind)
        with watched(model, recorder, gradients=True, max_frames=10_000, on_nonfinite="record") as w:
            loss_of(model(torch.randn(2, 4, requires_grad=True))).backward()
            is_spoilt = any(r.isfinite is False for f in backward_frames(w) for r in f.records)
            finding = w.report().finding
        findings[recorder] = repr(finding)
        assert is_spoilt == (finding is not None)
        if finding is None:
            continue
        if finding.origin == "received":
            assert finding.source_module == "steps.0"
            assert finding.module.startswith("steps.0.")
        else:
            assert finding.module == "steps.0" or any("steps.0" in remark for remark in finding.remarks)
    assert len(set(findings.values())) == 1


# Order, batches, lifetimes


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_a_gradient_bears_the_batch_of_its_forward(recorder: str, tmp_path: Path) -> None:
    """Two forwards before their backwards, the later one first; of the first there is a trace."""
    model, trace = mlp(), nanwatch.Trace(tmp_path / "run.parquet", batches=[0])
    with watched(model, recorder, gradients=True, max_frames=100, trace=trace) as w:
        first, second = model(torch.ones(1, 3)).sum(), model(torch.ones(1, 3)).sum()
        second.backward()
        first.backward()
        batches = [(f.batch, f.name) for f in backward_frames(w)]
    assert batches == [(b, name) for b in (1, 0) for name in ("2", "1", "0", "")]
    assert [(0, f.name) for f in Trace.open(trace.path).frames(0) if f.phase == "backward"] == batches[4:]


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_autograd_grad_is_seen_as_backward_is(recorder: str) -> None:
    """Gradients handed to the caller: of weights and of a leaf input, to the end of a double backward."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh())
    x = torch.randn(4, 3, requires_grad=True)
    with watched(model, recorder, gradients=True, max_frames=100) as w:
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        first = len(backward_frames(w))
        penalty = grad.square().sum()
        penalty.backward()
        frames = backward_frames(w)
    assert first == 3
    by_label = {(f.name, r.label): r for f in frames[:3] for r in f.records}
    assert by_label["", "input[0].grad"].abs_max == grad.abs().max().item()
    assert ("0", "weight.grad") not in by_label
    weights = [r.abs_max for f in frames[3:] for r in f.records if r.label == "weight.grad"]
    assert weights == [model[0].weight.grad.abs().max().item()]


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_a_weight_used_past_its_module_is_its_latest_calls(recorder: str) -> None:
    """Nobody takes the outputs of the module's calls, and a function takes its weight: its frame has this alone."""
    kept: list[Tensor] = []

    def forward(layer: nn.Module, x: Tensor) -> Tensor:
        kept.append(layer(x))
        return nn.functional.linear(x, layer.weight)

    model = Does(forward, nn.Linear(3, 2))
    # Each of two watches sees it. A later call has no part in it once its graph is gone.
    with watched(model, recorder, gradients=True), watched(model, recorder, gradients=True) as w:
        x = torch.ones(1, 3, requires_grad=True)
        outputs = [model(x) for _ in range(3)]
        kept.pop()
        outputs[0].sum().backward()
        (2 * x).sum().backward()  # in which no call has a part
        frames = {(f.batch, f.name): [r.label for r in f.records] for f in backward_frames(w)}
    assert frames == {(0, ""): ["output.grad", "input[0].grad"], (1, "parts.0"): ["weight.grad"]}


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_checkpointed_modules_have_their_gradients(recorder: str, reentrant: bool) -> None:
    """Each weight's gradient once, as without checkpointing, whichever of the two runs built the graph."""

    def forward(first: nn.Module, middle: nn.Module, last: nn.Module, x: Tensor) -> Tensor:
        return last(checkpoint(middle, first(x), use_reentrant=reentrant))

    torch.manual_seed(0)
    model, x = Does(forward, nn.Linear(3, 3), mlp(), nn.Linear(2, 1)), torch.randn(2, 3)
    with watched(model, recorder, gradients=True, max_frames=100) as w:
        model(x).sum().backward()
        found = {f"{n}.{x}": high for n, x, _, _, high in seen(w) if not x.startswith(("in", "out"))}
        assert len(found) == sum(not one[1].startswith(("in", "out")) for one in seen(w))
    assert found == {f"{name}.grad": p.grad.abs().max().item() for name, p in model.named_parameters()}


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_hooks_keep_nothing_alive_and_do_nothing_after_the_end(recorder: str) -> None:
    """Graph, activations and watch go when they would; a leaf is as it was, and later backwards are not seen."""
    model = mlp()
    w = watched(model, recorder, gradients=True)
    x = torch.ones(1, 3, requires_grad=True)
    leaves = x, *model.parameters()
    hidden = model[0](x)
    weak = weakref.ref(hidden)
    loss = model[2](model[1](hidden)).sum()
    del hidden
    loss.backward()
    del loss
    gc.collect()
    assert weak() is None
    loss = model(x).sum()
    assert sum(len(leaf._backward_hooks or ()) for leaf in leaves) <= 6  # of this graph alone
    w.stop()
    frames = w.frames
    (loss + model(x).sum()).backward()
    assert w.frames == frames
    assert not any(leaf._backward_hooks for leaf in leaves)
    gone = weakref.ref(w)
    del w
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_a_backward_that_raises_leaves_what_came_until_then(recorder: str) -> None:
    """A user's hook raises: its error comes through, and the frames have the gradients before it."""
    model = mlp()
    with watched(model, recorder, gradients=True, max_frames=100) as w:
        hidden = model[1](model[0](torch.ones(1, 3)))
        hidden.register_hook(lambda gradient: {}["mine"])
        with pytest.raises(LookupError, match="mine"):
            model[2](hidden).sum().backward()
        labels = [(f.name, [r.label for r in f.records]) for f in backward_frames(w)]
    assert ("2", ["output.grad", "bias.grad", "weight.grad", "input[0].grad"][: len(labels[0][1])]) in labels
    assert all(name != "0" for name, _ in labels)


# Findings


def test_a_shared_weight_says_with_whom() -> None:
    """Its gradient is the sum over all modules that use it. A backward from the loss once more tells which one."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.table(x) + 1e30)

    model = Tied()
    finding = failing_backward(model, torch.tensor([0, 1]), lambda y: (y * 1e10).sum()).finding
    assert (finding.module, finding.label) == ("table", "weight.grad")
    assert (finding.origin, finding.source_module, finding.operation) == ("received", "head", "MmBackward0")
    assert any("shared with" in remark for remark in finding.remarks)
