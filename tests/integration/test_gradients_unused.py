"""watch(gradients=True) of models that make more than the loss uses: frames, bits and lifetimes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.heap import assert_no_growth
from support.hooked_gradients import (
    HookedGradients,
    Seen,
    gradients_of,
    largest_of_weights,
    new_frames,
    train,
)
from support.recorders import RECORDERS, WITH_DEVICE, watched
from support.training import assert_same_bits
from support.unused_results import Branches, Case, branch, whole


class Several(nn.Module):
    """A layer, and several results of it: of operations of their own, or of one."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor) -> Any:
        y = self.layer(x)
        if self.how == "own":
            return {"logits": y * 2, "hidden": y.tanh()}
        if self.how == "view":
            return y, y.view(-1)
        if self.how == "chunk":
            return y.chunk(2, dim=1)
        if self.how == "unbind":
            return y.unbind(0)
        return torch.linalg.svd(y, full_matrices=False)


class Behind(nn.Module):
    """Module between two layers, of whose results only some go on."""

    def __init__(self, how: str, *used: Any) -> None:
        super().__init__()
        self.first, self.several, self.used = nn.Linear(4, 4), Several(how), used
        self.last = nn.LazyLinear(2)

    def forward(self, x: Tensor) -> Tensor:
        found = self.several(self.first(x).tanh())
        return self.last(torch.cat([found[i].reshape(-1) for i in self.used]))


class Recurrent(nn.Module):
    """PyTorch's own modules that return more than one tensor."""

    def __init__(self, part: nn.Module, only_state: bool = False) -> None:
        super().__init__()
        self.part, self.last, self.only_state = part, nn.Linear(4, 2), only_state

    def forward(self, x: Tensor) -> Tensor:
        found = self.part(x, x, x) if isinstance(self.part, nn.MultiheadAttention) else self.part(x)
        return self.last(found[1][0] if self.only_state else found[0])


class Exits(nn.Module):
    """A head behind each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(4, 2) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        found = []
        for layer, head in zip(self.layers, self.heads, strict=True):
            x = layer(x).tanh()
            found.append(head(x))
        return found


def one_in_turn(output: list[Tensor], step: int) -> Tensor:
    return whole(output[step % len(output)], step)


CASES = {
    "a result of its own operation": Case(lambda: Behind("own", "logits")),
    "the other one": Case(lambda: Behind("own", "hidden")),
    "a view of the other result": Case(lambda: Behind("view", 1)),
    "a chunk": Case(lambda: Behind("chunk", 1)),
    "a row of several": Case(lambda: Behind("unbind", 1)),
    "singular values": Case(lambda: Behind("svd", 1)),
    "a state of an LSTM": Case(lambda: Recurrent(nn.LSTM(4, 4)), shape=(3, 2, 4)),
    "the outputs of an LSTM": Case(lambda: Recurrent(nn.LSTM(4, 4), True), shape=(3, 2, 4)),
    "weights of an attention": Case(lambda: Recurrent(nn.MultiheadAttention(4, 2)), shape=(3, 2, 4)),
    "a branch": Case(lambda: Branches("used", "unused", "used")),
    "a branch that is not called": Case(lambda: Branches("used", "not called", "unused", "used")),
    "a branch that is only measured": Case(lambda: Branches("used", "metric", "unused")),
    "a detached branch": Case(lambda: Branches("detached", "used", "called without gradients", "used")),
    "a branch times zero": Case(lambda: Branches("used", "times zero", "unused")),
    "later layers": Case(Exits, one_in_turn),
    "what a wrapper returns": Case(
        lambda: nn.Sequential(Several("own")), lambda y, step: whole(y["hidden"], step)
    ),
}


# The weights that have no gradient in the last of five steps.
WITHOUT_GRADIENT = {
    "a branch": branch(0),
    "a branch that is not called": branch(1, 2),
    "a branch that is only measured": branch(0, 1),
    "a detached branch": branch(0, 2),
    "a branch times zero": branch(1),
    "later layers": {
        f"{name}.{label}" for name in ("heads.0", "heads.2", "layers.2") for label in ("weight", "bias")
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_the_frames_are_those_of_plain_hooks(case: str, recorder: str) -> None:
    """Each backward has the frames and records that hooks on another copy see, in that order; losses, gradients,
    weights and what is None are those of a training that nobody looks at, to the bit.
    """
    chosen = CASES[case]
    plain, hooked, ours = (chosen.built() for _ in range(3))
    expected: list[list[Seen]] = []
    found: list[list[Seen]] = []
    oracle = HookedGradients(hooked)
    trace = train(plain, chosen.batches(), chosen.loss_of)
    hooked_trace = train(
        hooked, chosen.batches(), chosen.loss_of, after_backward=lambda: expected.append(oracle.take())
    )
    with watched(ours, recorder, gradients=True, max_frames=10_000) as w:
        new = new_frames(w)
        our_trace = train(ours, chosen.batches(), chosen.loss_of, after_backward=lambda: found.append(new()))
        assert w.report().finding is None
        assert w.skipped_steps == ()
    assert found == expected
    assert len(found) == 5
    assert_same_bits(our_trace, trace)
    assert_same_bits(hooked_trace, trace)
    assert {name for name, x in gradients_of(ours).items() if x is None} == WITHOUT_GRADIENT.get(case, set())


def test_what_nobody_uses_has_no_frame_and_no_record() -> None:
    """Written out: of a chunk that is used alone the record says which; a branch that is not used is not there."""
    found = {}
    for case in ("a chunk", "a branch"):
        model = CASES[case].built()
        with watched(model, "python", gradients=True, max_frames=100) as w:
            whole(model(torch.ones(2, 4)), 0).backward()
            found[case] = {f.name: [r.label for r in f.records] for f in w.frames if f.phase == "backward"}
    assert found["a chunk"]["several"] == ["output[1].grad", "input[0].grad"]
    assert {name for name in found["a branch"] if name.startswith("branches")} == {
        f"branches.{i}{end}" for i in (0, 2) for end in ("", ".0", ".1")
    }


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_a_backward_for_each_result(recorder: str) -> None:
    """retain_graph: three results of one forward, each with a backward of its own, and the first once more."""

    def run(model: nn.Module, take: Callable[[], Any]) -> list[Any]:
        outputs = model(torch.ones(2, 4))
        taken = []
        for i, keep in ((2, True), (0, True), (1, True), (2, False)):
            whole(outputs[i], 0).backward(retain_graph=keep)
            taken.append(take())
        return [taken, gradients_of(model)]

    hooked, ours = CASES["later layers"].built(), CASES["later layers"].built()
    oracle = HookedGradients(hooked)
    expected = run(hooked, lambda: oracle.take(again=True))
    with watched(ours, recorder, gradients=True, max_frames=1000) as w:
        found = run(ours, new_frames(w))
    assert found[0] == expected[0]
    assert found[0][0] == found[0][3]
    assert_same_bits(found[1], expected[1])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("how", ["own", "chunk", "unbind"])
@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_a_checkpointed_part_of_whose_results_one_is_used(recorder: str, how: str, reentrant: bool) -> None:
    """The training is that without a watch, and each weight's gradient has its record once."""

    class Checkpointed(Behind):
        def forward(self, x: Tensor) -> Tensor:
            y = self.first(x).tanh()
            found: Any = checkpoint(
                lambda z: tuple(labelled_values(self.several(z))), y, use_reentrant=reentrant
            )
            return self.last(found[1].reshape(-1))

    case = Case(lambda: Checkpointed(how, 1))
    plain, ours = case.built(), case.built()
    expected = train(plain, case.batches(), whole)
    with watched(ours, recorder, gradients=True, max_frames=1000) as w:
        assert_same_bits(train(ours, case.batches(), whole), expected)
        rows = [
            (f"{frame.name}.{r.label}".removesuffix(".grad"), r.abs_max)
            for frame in w.frames
            if frame.phase == "backward" and frame.batch == w.batch
            for r in frame.records
            if not r.label.startswith(("input", "output"))
        ]
    last = {name: x.abs().max().item() for name, x in gradients_of(ours).items() if x is not None}
    assert sorted(rows) == sorted(last.items())


def labelled_values(found: Any) -> list[Tensor]:
    return list(found.values() if isinstance(found, dict) else found)


class NoGradient(torch.autograd.Function):
    """The identity, whose backward has no gradient for its weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class TakesNone(nn.Module):
    """A weight whose gradient is None, and one that has one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.layer = nn.Parameter(torch.ones(3)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return NoGradient.apply(self.layer(x), self.weight)


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_a_gradient_that_is_none_has_no_record(recorder: str) -> None:
    """A function that gives None for a weight: autograd calls the weight's hooks with None."""
    plain, ours = (Case(TakesNone).built() for _ in range(2))
    expected = train(plain, Case(TakesNone).batches(), whole)
    with watched(ours, recorder, gradients=True, max_frames=1000) as w:
        assert_same_bits(train(ours, Case(TakesNone).batches(), whole), expected)
        labels = {(f.name, r.label) for f in w.frames if f.phase == "backward" for r in f.records}
    assert labels == {
        *(("", "output.grad"), ("layer", "output.grad")),
        *(("layer", "weight.grad"), ("layer", "bias.grad")),
    }


@pytest.fixture
def _one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("torch was built without gloo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("case", ["a branch", "a branch that is not called", "a chunk", "later layers"])
@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_find_unused_parameters_of_distributed_data_parallel(recorder: str, case: str) -> None:
    """The training is that without a watch, and the records of weights' gradients are those that autograd brings."""
    chosen = CASES[case]
    plain, hooked, ours = (chosen.built() for _ in range(3))
    oracle = HookedGradients(hooked)
    expected: list[list[Seen]] = []
    found: list[list[Seen]] = []

    def wrapped(model: nn.Module) -> nn.Module:
        return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)

    trace = train(wrapped(plain), chosen.batches(), chosen.loss_of)
    train(hooked, chosen.batches(), chosen.loss_of, after_backward=lambda: expected.append(oracle.take()))
    with watched(ours, recorder, gradients=True, max_frames=10_000) as w:
        new = new_frames(w)
        our_trace = train(
            wrapped(ours), chosen.batches(), chosen.loss_of, after_backward=lambda: found.append(new())
        )
        assert w.skipped_steps == ()
    assert_same_bits(our_trace, trace)
    assert weights(found) == weights(expected)
    assert any(rows for rows in weights(found))


def weights(backwards: list[list[Seen]]) -> list[list[tuple[Any, ...]]]:
    """Return for each backward the rows of weights, sorted by module."""
    return [
        sorted(
            (name, *row)
            for name, rows in frames
            for row in rows
            if not row[0].startswith(("input", "output"))
        )
        for frames in backwards
    ]


# Lifetimes


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_what_nobody_uses_is_gone_when_it_would_be(recorder: str) -> None:
    """An unused result goes when its last name goes, before any backward; its graph goes with what used it."""
    model = CASES["a branch"].built()
    branch = model.branches[1]
    alive = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        alive.append(weakref.ref(output))

    branch.register_forward_hook(note)
    with watched(model, recorder, gradients=True):
        for _ in range(3):
            output = model(torch.ones(2, 4))
            gc.collect()
            model.calls = 0
            assert [one() for one in alive if one() is not None] == []
            whole(output, 0).backward()
    assert len(alive) == 3


@pytest.mark.slow
@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("case", ["a chunk", "a branch", "later layers"])
def test_nothing_grows_while_results_go_unused(case: str, recorder: str) -> None:
    """Over many steps, with one leaf for an input in all of them, and some forwards without a backward: neither the C
    heap nor Python's memory grows by what a call, a hook or a frame would take.
    """
    model, loss_of = CASES[case].built(), CASES[case].loss_of
    x = torch.ones(2, 4, requires_grad=True)

    def run(steps: int) -> None:
        for step in range(steps):
            loss = loss_of(model(x), step)
            if step % 4:
                loss.backward()
            model.zero_grad()
            x.grad = None

    # The forecasts keep numbers of the latest batches.
    with watched(model, recorder, gradients=True, forecast=False):
        # A call takes more than 50 bytes, and there are 4 or more in each step.
        assert_no_growth(run, 75, 4 * 10)


# torch.compile


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "case", ["a chunk", "a row of several", "a result of its own operation", "a state of an LSTM"]
)
@pytest.mark.parametrize("recorder", RECORDERS)
def test_a_compiled_model_with_unused_results(recorder: str, case: str, backend: str) -> None:
    """Trained as one that is compiled and not watched; each weight's gradient has its record."""
    chosen = CASES[case]
    plain, ours = chosen.built(), chosen.built()
    torch._dynamo.reset()
    expected = train(torch.compile(plain, backend=backend), chosen.batches()[:3], chosen.loss_of)
    torch._dynamo.reset()
    with watched(ours, recorder, gradients=True, max_frames=1000) as w:
        trace = train(torch.compile(ours, backend=backend), chosen.batches()[:3], chosen.loss_of)
        rows = largest_of_weights(w)
    torch._dynamo.reset()
    assert_same_bits(trace, expected)
    assert rows == {(name, x.abs().max().item()) for name, x in gradients_of(ours).items() if x is not None}
