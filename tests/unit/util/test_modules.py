"""Modules in the order of PyTorch, and weak dicts by identity for classes that define equality."""

from __future__ import annotations

import gc
from typing import Any

from torch import nn

from nanwatch.util.modules import WeakIdentityDict, each_module, each_parameter


def test_the_order_is_that_of_pytorch() -> None:
    """A module under two names comes once, under the first, and so does a tied weight."""
    shared = nn.Linear(2, 2)
    model = nn.Sequential(
        nn.Sequential(nn.ReLU(), shared), nn.ModuleDict({"x": shared, "y": nn.Linear(2, 2)})
    )
    model[1]["y"].weight = shared.weight
    model.register_module("absent", None)
    assert [(path, id(module)) for path, module in each_module(model)] == [
        (path, id(module)) for path, module in model.named_modules()
    ]
    assert [id(x) for x in each_parameter(model)] == [id(x) for x in model.parameters()]


def test_values_live_as_long_as_their_objects() -> None:
    """Equal objects have values of their own; what is gone has none, and neither has another at its address."""

    class Key:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    kept: WeakIdentityDict[int] = WeakIdentityDict()
    a: Any = Key()
    b: Any = Key()
    kept[a], kept[b] = 1, 2
    assert (kept.get(a), kept.get(b), kept.get(Key())) == (1, 2, None)
    assert [one is other for one, other in zip(kept.objects(), (a, b), strict=True)] == [True, True]
    del a
    gc.collect()
    assert [one is b for one in kept.objects()] == [True]
    kept[b] = 3
    assert kept.get(b) == 3
    kept.clear()
    assert kept.get(b) is None
