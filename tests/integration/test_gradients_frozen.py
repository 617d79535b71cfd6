"""watch(gradients=True) of models of which a part is frozen: frames, bits and lifetimes."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanwatch.session.api import watch
from support.gradient_models import Adapted, freeze
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


class Block(nn.Module):
    """A residual block with a norm."""

    def __init__(self, size: int = 4) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(size), nn.Linear(size, 8), nn.Linear(8, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Words(nn.Module):
    """An embedding, two blocks and a head."""

    def __init__(self, *, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 3)
        self.reentrant = checkpointed

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


def lora() -> nn.Module:
    """All frozen but the adapters in the blocks."""
    model = Words()
    freeze(model)
    for block in model.blocks:
        block.up, block.down = Adapted(block.up), Adapted(block.down)
    return model


def frozen(choose: Callable[[Any], list[nn.Module]]) -> Callable[[], nn.Module]:
    """Words, of which these modules are frozen."""

    def make() -> nn.Module:
        model = Words()
        freeze(*choose(model))
        return model

    return make


def biases_alone() -> nn.Module:
    """Only biases are trained."""
    model = Words()
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias"))
    return model


def embedding_that_requires_gradients() -> nn.Module:
    """A frozen embedding whose output requires gradients, as checkpointing of adapters asks for."""
    model = Words()
    freeze(model.embed, model.blocks[0].up)
    model.embed.register_forward_hook(lambda module, args, output: output.requires_grad_())
    return model


def thawing(model: nn.Module, step: int) -> None:
    """After the first step a block is frozen and the embedding is not; after the third the other way round."""
    if step in (0, 2):
        model.blocks[1].requires_grad_(step == 2)
        model.embed.requires_grad_(step == 0)


def starts_frozen() -> nn.Module:
    model = Words()
    freeze(model.embed)
    return model


class Case(NamedTuple):
    """A model, and what happens to it after each step."""

    make: Callable[[], nn.Module]
    after_step: Callable[[nn.Module, int], None] = lambda model, step: None

    def built(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()


CASES = {
    "one layer in the middle": Case(frozen(lambda m: [m.blocks[0].up])),
    "a whole block in the middle": Case(frozen(lambda m: [m.blocks[1]])),
    "the embedding": Case(frozen(lambda m: [m.embed])),
    "all but the head": Case(frozen(lambda m: [m.embed, m.blocks])),
    "the head": Case(frozen(lambda m: [m.head])),
    "all but the embedding": Case(frozen(lambda m: [m.blocks, m.head])),
    "all but adapters": Case(lora),
    "all but biases": Case(biases_alone),
    "an embedding whose output requires gradients": Case(embedding_that_requires_gradients),
    "after the first step": Case(Words, lambda m, step: freeze(m.blocks[0]) if step == 0 else None),
    "all but the head after the first step": Case(
        Words, lambda m, step: freeze(m.embed, m.blocks) if step == 0 else None
    ),
    "first one part, then another": Case(starts_frozen, thawing),
}
WORDS = [torch.randint(16, (2, 5), generator=torch.Generator().manual_seed(i)) for i in range(5)]


def loss_of(output: Tensor, step: int) -> Tensor:
    return (output - 1).square().mean()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_the_frames_are_those_of_plain_hooks(case: str, recorder: str) -> None:
    """Each backward has the frames and records that hooks on another copy see, in that order; losses, gradients,
    weights and what is None are those of a training that nobody looks at, to the bit.
    """
    plain, hooked, ours = (CASES[case].built() for _ in range(3))
    after_step = CASES[case].after_step
    expected: list[list[Seen]] = []
    found: list[list[Seen]] = []
    oracle = HookedGradients(hooked)
    traces = [train(plain, WORDS, loss_of, after_step=after_step)]
    traces.append(
        train(
            hooked,
            WORDS,
            loss_of,
            after_step=after_step,
            after_backward=lambda: expected.append(oracle.take()),
        )
    )
    with watched(ours, recorder, gradients=True, max_frames=10_000) as w:
        new = new_frames(w)
        traces.append(
            train(ours, WORDS, loss_of, after_step=after_step, after_backward=lambda: found.append(new()))
        )
        assert w.report().finding is None
        assert w.skipped_steps == ()
    assert found == expected
    assert len(found) == len(WORDS)
    assert_same_bits(traces[2], traces[0])
    assert_same_bits(traces[1], traces[0])


def test_what_is_frozen_has_no_record_and_passes_gradients_on() -> None:
    """Written out: a frozen block between trained ones has the gradients of outputs and inputs, and none of weights;
    before the first that is trained there is nothing.
    """
    model = CASES["a whole block in the middle"].built()
    with watched(model, "python", gradients=True, max_frames=100) as w:
        loss_of(model(WORDS[0]), 0).backward()
        labels = {f.name: [r.label for r in f.records] for f in w.frames if f.phase == "backward"}
    assert labels["blocks.1.up"] == ["output.grad", "input[0].grad"]
    assert labels["blocks.1"] == ["output.grad", "input[0].grad"]
    assert labels["blocks.0.up"] == ["output.grad", "bias.grad", "weight.grad", "input[0].grad"]
    model = CASES["all but the head"].built()
    with watched(model, "python", gradients=True, max_frames=100) as w:
        loss_of(model(WORDS[0]), 0).backward()
        labels = {f.name: [r.label for r in f.records] for f in w.frames if f.phase == "backward"}
    assert labels == {"head": ["output.grad", "bias.grad", "weight.grad"], "": ["output.grad"]}


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_a_weight_that_is_frozen_between_forward_and_backward(recorder: str) -> None:
    """Autograd adds nothing to it, and the training is that of an unwatched model."""
    ends = []
    for name in ("", recorder):
        model = Words()
        model.load_state_dict(CASES["the head"].built().state_dict())
        with watched(model, name, gradients=True) if name else torch.enable_grad():
            loss = loss_of(model(WORDS[0]), 0)
            freeze(model.head)
            loss.backward()
        ends.append(gradients_of(model))
    assert ends[0]["head.weight"] is None
    assert_same_bits(ends[1], ends[0])


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("which", ["embedding", "adapters"])
@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_checkpointed_blocks_with_frozen_parts(recorder: str, which: str, reentrant: bool) -> None:
    """Each trained weight has the record of the gradient that it has, once, and no frozen one has any; the training
    is that without a watch.
    """

    def built() -> nn.Module:
        torch.manual_seed(0)
        model = Words(checkpointed=reentrant)
        freeze(model.embed, model.blocks[0].down)
        if which == "adapters":
            freeze(model)
            for block in model.blocks:
                block.up = Adapted(block.up)
        # A reentrant checkpoint needs this, and PEFT does it.
        model.embed.register_forward_hook(lambda module, args, output: output.requires_grad_())
        return model

    plain, ours = built(), built()
    expected = train(plain, WORDS, loss_of)
    with watched(ours, recorder, gradients=True, max_frames=10_000) as w:
        assert_same_bits(train(ours, WORDS, loss_of), expected)
        batch = max(frame.batch for frame in w.frames)
        rows = [
            (f"{frame.name}.{r.label}".removesuffix(".grad"), r.abs_max)
            for frame in w.frames
            if frame.phase == "backward" and frame.batch == batch
            for r in frame.records
            if not r.label.startswith(("input", "output"))
        ]
    last = {name: x.abs().max().item() for name, x in gradients_of(ours).items() if x is not None}
    assert sorted(rows) == sorted(last.items())


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_a_penalty_on_the_gradient_of_a_frozen_input(recorder: str) -> None:
    """Double backward through a frozen layer: each of both runs has the frames that plain hooks see in it."""
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))

    def built() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        freeze(model[2])
        return model

    def run(model: nn.Module, take: Callable[[], list[Seen]]) -> list[Any]:
        leaf = x.clone().requires_grad_()
        (grad,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
        first = take()
        grad.square().sum().backward()
        return [first, take(), gradients_of(model)]

    hooked, ours = built(), built()
    oracle = HookedGradients(hooked)
    expected = run(hooked, lambda: oracle.take(again=True))
    with watched(ours, recorder, gradients=True, max_frames=1000) as w:
        found = run(ours, new_frames(w))
    assert found[:2] == expected[:2]
    assert_same_bits(found[2], expected[2])


# Lifetimes


@pytest.mark.parametrize("case", ["all but the head", "all but adapters", "after the first step"])
@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_what_the_backward_needed_is_gone_with_it(case: str, recorder: str) -> None:
    """Outputs, their gradients and their nodes, behind what is frozen and before it, also where no backward came."""
    model = CASES[case].built()
    references: list[weakref.ref[Any]] = []

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        references.append(weakref.ref(output))
        if output.grad_fn is not None:
            # A node takes no weak reference, and lives as long as what is in its metadata.
            output.grad_fn.metadata["nanwatch"] = kept = type("Kept", (), {})()
            references.append(weakref.ref(kept))
            output.register_hook(lambda gradient: references.append(weakref.ref(gradient)))

    with watched(model, recorder, gradients=True):
        for step in range(3):
            handles = [module.register_forward_hook(note) for module in model.modules()]
            loss = loss_of(model(WORDS[step]), step)
            for handle in handles:
                handle.remove()
            before = len(references)
            assert any(one() is not None for one in references)
            if step != 1:
                loss.backward()
                assert len(references) > before
            model.zero_grad()
            del loss
            CASES[case].after_step(model, step)
            gc.collect()
            assert [one() for one in references if one() is not None] == []
            references.clear()


@pytest.mark.slow
@pytest.mark.parametrize("recorder", RECORDERS)
def test_nothing_grows_while_a_part_is_frozen_and_thawed(recorder: str) -> None:
    """Over many steps neither the C heap nor Python's memory grows by what a call, a hook or a frame would take."""
    model = CASES["all but adapters"].built()

    def run(steps: int) -> None:
        for step in range(steps):
            model.blocks[0].norm.requires_grad_(step % 3 == 0)
            loss_of(model(WORDS[0]), step).backward()
            model.zero_grad()

    # The forecasts keep numbers of the latest batches.
    with watched(model, recorder, gradients=True, forecast=False):
        # A call takes more than 50 bytes, and there are 25 in each step.
        assert_no_growth(run, 50, 25 * 10)


# torch.compile


@functools.cache
def trained_compiled(case: str, backend: str) -> Any:
    """Return what a training of the compiled model leaves that nobody watches."""
    torch._dynamo.reset()
    return train(torch.compile(CASES[case].built(), backend=backend, fullgraph=True), WORDS[:3], loss_of)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "backend"),
    [
        ("the embedding", "aot_eager"),
        ("a whole block in the middle", "aot_eager"),
        ("all but the head", "eager"),
        ("all but adapters", "eager"),
        ("all but adapters", "aot_eager"),
    ],
)
@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_a_compiled_model_with_frozen_parts(recorder: str, case: str, backend: str) -> None:
    """One graph, trained as it would be unwatched; each trained weight has its record, no other has one."""
    expected, ours = trained_compiled(case, backend), CASES[case].built()
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    with (
        watched(ours, recorder, gradients=True, max_frames=1000) as w,
        torch._dynamo.config.patch(error_on_recompile=True),
    ):
        assert_same_bits(train(compiled, WORDS[:3], loss_of), expected)
        rows = largest_of_weights(w)
    last = {name: x.abs().max().item() for name, x in gradients_of(ours).items() if x is not None}
    assert rows == set(last.items())
    torch._dynamo.reset()


@pytest.mark.slow
def test_freezing_compiles_anew_and_is_watched() -> None:
    """A part that is frozen after two compiled steps has no gradient from then on; the rest goes on."""
    torch._dynamo.reset()
    case = CASES["after the first step"]
    plain, ours = case.built(), case.built()
    expected = train(torch.compile(plain, backend="aot_eager"), WORDS, loss_of, after_step=late_freeze)
    with watch(ours, gradients=True, max_frames=10_000) as w:
        trace = train(torch.compile(ours, backend="aot_eager"), WORDS, loss_of, after_step=late_freeze)
        owners = {
            batch: {
                frame.name
                for frame in w.frames
                if frame.phase == "backward" and frame.batch == batch
                if any(r.label == "weight.grad" for r in frame.records)
            }
            for batch in (1, 2)
        }
    assert_same_bits(trace, expected)
    weights = {name.rpartition(".")[0] for name, _ in ours.named_parameters() if name.endswith("weight")}
    assert owners[1] == weights
    assert owners[2] == {name for name in weights if not name.startswith("blocks.0")}
    torch._dynamo.reset()


def late_freeze(model: nn.Module, step: int) -> None:
    """After the second step."""
    if step == 1:
        freeze(model.blocks[0])
