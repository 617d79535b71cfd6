"""Situations that a real model meets: in each nanwatch does what a user would expect, and none crashes."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from support.toys import Scale, fault_of, mlp, names
from support.watching import watch

INF = float("inf")


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
