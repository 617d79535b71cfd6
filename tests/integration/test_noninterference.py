"""A watched training ends as an unwatched one does: same bits everywhere, and no tensor lives longer."""

from __future__ import annotations

import copy
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.session.api import watch
from support.architectures import ARCHITECTURES, built, inputs_of
from support.training import assert_same_bits, loss_of

STEPS = 10


def with_dropout(model: nn.Module) -> nn.Module:
    """The model in training, each of its dropouts at 0.1."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    return model.train()


def train(name: str, watched: bool, **options: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """Ten steps from the same seed, checkpointed where the model can: the losses, and all that is left at the end."""
    model = with_dropout(copy.deepcopy(built(name)))
    if getattr(model, "supports_gradient_checkpointing", False):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    watcher = watch(model, **options) if watched else None
    torch.manual_seed(1)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model(**ARCHITECTURES[name].inputs()))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    if watcher is not None:
        assert watcher.batch == STEPS - 1
        assert watcher.report().finding is None
        watcher.stop()
    end = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": torch.get_rng_state()}
    return losses, end


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("gradients", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_watched_training_ends_with_the_same_bits(name: str, gradients: bool) -> None:
    """Weights, buffers, losses, optimizer state and random state."""
    assert_same_bits(train(name, True, gradients=gradients), train(name, False))


def alive_at_each_call(watched: bool, is_training: bool) -> list[list[int]]:
    """Return which activations are alive, by weak references, at each module's call and at the end of each step."""
    model = with_dropout(copy.deepcopy(built("gpt2")))
    references: list[weakref.ref[Tensor]] = []
    counts: list[list[int]] = []

    def count() -> None:
        counts.append([i for i, reference in enumerate(references) if reference() is not None])

    def note(module: nn.Module, args: Any, output: Any) -> None:
        count()
        tensors = output if isinstance(output, tuple) else [output]
        references.extend(weakref.ref(x) for x in tensors if isinstance(x, Tensor))

    for module in model.modules():
        module.register_forward_hook(note)
    torch.manual_seed(0)
    with watch(model) if watched else nullcontext(), torch.set_grad_enabled(is_training):
        for step in range(2):
            output = model(**inputs_of("gpt2", step))
            if is_training:
                loss_of(output).backward()
            del output
            count()
    return counts


@pytest.mark.parametrize("is_training", [True, False], ids=["training", "inference"])
def test_every_activation_is_gone_when_it_would_be(is_training: bool) -> None:
    """The activations alive at each moment are those alive unwatched."""
    alive = alive_at_each_call(watched=True, is_training=is_training)
    assert alive == alive_at_each_call(watched=False, is_training=is_training)
    assert alive[-1] == []
