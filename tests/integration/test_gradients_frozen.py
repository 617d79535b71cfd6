"""watch(gradients=True) of models of which a part is frozen: frames, bits and lifetimes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from support.gradient_models import Adapted, freeze
from support.heap import assert_no_growth
from support.hooked_gradients import (
    HookedGradients,
    Seen,
    gradients_of,
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


# Lifetimes


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
