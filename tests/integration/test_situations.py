"""Situations that a real model meets: in each nanwatch does what a user would expect, and none crashes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from support.architectures import built, inputs_of
from support.toys import Scale, fault_of, mlp, names
from support.watching import watch

INF = float("inf")


# Batches


def test_each_step_of_generate_is_a_batch() -> None:
    """`generate` calls the model once a token: as many batches, each ended by a frame of the root."""
    model = built("gpt2").eval()
    prompt = inputs_of("gpt2", 0)["input_ids"]
    with watch(model, max_frames=1000) as w:
        output = model.generate(
            prompt, min_new_tokens=4, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None
        )
    assert output.shape[1] - prompt.shape[1] == 4
    assert [batch for batch, name in names(w) if name == ""] == [0, 1, 2, 3]
    assert {batch for batch, _ in names(w)} == {0, 1, 2, 3}


def test_a_fault_in_a_recomputed_forward_is_told() -> None:
    """An infinity that only the recomputation makes is found, in the batch of its forward."""
    scale = Scale()
    model = nn.Sequential(scale, nn.Linear(2, 2))

    def run(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)

    with watch(model, on_nonfinite="record") as w:
        loss = run(torch.ones(1, 2)).sum()
        scale.factor = INF
        loss.backward()
    finding = w.report().finding
    assert (finding.module, finding.batch, w.batch) == ("0", 0, 0)
    assert w.report().frames[-1].recomputed


class Countdown(nn.Module):
    """Calls itself as often as it is told, then its part."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Scale(2.0)

    def forward(self, x: Tensor, times: int) -> Tensor:
        return self.part(x) if times == 0 else self(x, times - 1) * 1.5


@pytest.mark.usefixtures("each_recorder")
def test_a_module_that_calls_itself_is_one_batch() -> None:
    """A frame for each call as it returns, innermost first, each with its own output; nothing is left for the next."""
    model = Countdown()
    with watch(model, max_frames=100) as w:
        for _ in range(2):
            model(torch.ones(1), 3)
    assert names(w) == [(batch, name) for batch in (0, 1) for name in ("part", "", "", "", "")]
    outputs = [frame.records[-1].abs_max for frame in w.frames if frame.batch == 1]
    assert outputs == [2.0, 2.0, 3.0, 4.5, 6.75]
    model.part.factor = INF
    with watch(model):
        finding = fault_of(model, torch.ones(1), 2).finding
    assert (finding.module, finding.label) == ("part", "output")


# The model changes


def test_modules_added_and_replaced_later_are_watched() -> None:
    """Children of any depth, put in by attribute, add_module, append or assignment, have frames and their names."""
    model = nn.Sequential(Scale())
    with watch(model) as w:
        model.append(nn.Sequential(Scale(), Scale()))
        model.add_module("head", Scale())
        model[0] = nn.Tanh()
        model(torch.ones(1))
        assert [name for _, name in names(w)] == ["0", "1.0", "1.1", "1", "head", ""]
        assert w.frames[0].class_name == "Tanh"
    model(torch.ones(1))
    assert w.batch == 0
    assert all(module._compiled_call_impl is None for module in model.modules())


@pytest.mark.usefixtures("each_recorder")
@pytest.mark.parametrize("when", ["before", "during"])
def test_parametrized_modules_compute_the_same_and_are_seen(when: str) -> None:
    """Weight norm put on before or during the watch: same output, frames of the parametrization's modules and class."""
    model, plain = mlp(), mlp()
    if when == "before":
        parametrizations.weight_norm(model[0])
    with watch(model) as w:
        if when == "during":
            model(torch.ones(2, 3))
            parametrizations.weight_norm(model[0])
        x = torch.randn(2, 3)
        output = model(x)
        module_names = [name for _, name in names(w)][-6:]
        assert module_names == ["0.parametrizations.weight.0", "0.parametrizations.weight", "0", "1", "2", ""]
        classes = [frame.class_name for frame in w.frames if frame.name == "0"]
        assert classes == ["Linear"] * (when == "during") + ["ParametrizedLinear"]
        with torch.no_grad():
            model[0].parametrizations.weight.original0[0, 0] = INF
        finding = fault_of(model, x).finding
    assert (finding.module, finding.label) == ("0.parametrizations.weight", "original0")
    parametrizations.weight_norm(plain[0])
    assert torch.equal(output, plain(x))
    parametrize.remove_parametrizations(model[0], "weight")
    assert model(x).shape == (2, 2)


# Several at once


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_several_watches_stop_in_any_order(order: tuple[int, ...]) -> None:
    """Three watches on one model, stopped in every order: each sees its own batches, then the model is as it was."""
    model = nn.Sequential(Scale(), Scale())
    # With the same options each would take the place of the one before.
    watches = [watch(model, max_frames=100 + number) for number in range(3)]
    for stopped in order:
        model(torch.ones(1))
        watches[stopped].stop()
    model(torch.ones(1))
    assert [watches[stopped].batch for stopped in order] == [0, 1, 2]
    assert [names(watches[order[0]])] == [[(0, "0"), (0, "1"), (0, "")]]
    assert all(module._compiled_call_impl is None for module in model.modules())


def test_several_models_have_batches_of_their_own() -> None:
    """A generator and a discriminator that takes what it makes: each counts its calls, and raises of its own fault."""
    generator, discriminator = nn.Sequential(Scale()), nn.Sequential(Scale())
    with watch(generator) as g, watch(discriminator) as d:
        for _ in range(3):
            discriminator(torch.ones(1))
            discriminator(generator(torch.ones(1)))
        generator[0].factor = INF
        assert fault_of(generator, torch.ones(1)).batch == 3
        assert fault_of(discriminator, torch.full((1,), INF)).batch == 6
    assert (g.batch, d.batch) == (3, 6)
    assert d.report().finding is not None
    assert d.report().finding.origin == "data"


# The life of a watch


def test_a_watched_model_is_freed_like_any_other() -> None:
    """Deleting the model frees it and its weights at once, without the garbage collector."""
    gc.collect()
    gc.disable()
    try:
        model = mlp()
        w = watch(model)
        model(torch.randn(2, 3))
        references = [weakref.ref(model), weakref.ref(model[0]), weakref.ref(model[0].weight)]
        del model
        assert [reference() for reference in references] == [None, None, None]
        assert len(w.frames) == 4
        w.stop()
    finally:
        gc.enable()


def test_a_watch_nobody_holds_goes_on_and_goes_with_the_model() -> None:
    """`watch(model)` without a name keeps watching; the watch is collected after the model."""
    model = nn.Sequential(Scale(INF))
    reference = weakref.ref(watch(model))
    gc.collect()
    fault_of(model, torch.ones(1))
    assert reference() is not None
    del model
    gc.collect()  # the model, which the error's traceback held
    gc.collect()
    assert reference() is None
