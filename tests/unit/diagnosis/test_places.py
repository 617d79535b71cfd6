"""Places that hold state: read, written and emptied, and gone with their owners."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from nanwatch.diagnosis.places import DEFAULTS, MISSING, Root

table: dict[str, Any] = {}


class Holder:
    """Has an attribute of the class and one of the object."""

    shared = 1

    def __init__(self) -> None:
        self.own = 1


def closure() -> Callable[[], Any]:
    value = 1

    def read(given: int = 1) -> Any:
        return value, given

    return read


def roots() -> dict[str, tuple[Any, Root, Callable[[Any], Any]]]:
    """Each kind of place with its owner, and how Python itself reads it."""
    holder, module, function = Holder(), nn.Module(), closure()
    module.register_buffer("own", torch.ones(1))
    table["own"] = 1
    return {
        "attribute": (holder, Root(weakref.ref(holder), "own"), lambda one: one.own),
        "class": (Holder, Root(weakref.ref(Holder), "shared"), lambda one: one.shared),
        "global": (table, Root(table, "own"), lambda one: one["own"]),
        "closure": (function, Root(weakref.ref(function), 0), lambda one: one()[0]),
        "defaults": (function, Root(weakref.ref(function), DEFAULTS), lambda one: one.__defaults__),
        "buffer": (module, Root(weakref.ref(module), "own", is_buffer=True), lambda one: one.own),
    }


@pytest.mark.parametrize("kind", roots())
def test_a_value_is_read_and_put_back(kind: str) -> None:
    """As Python sees it; taken away, it is missing, and can be put there once more."""
    owner, root, read = roots()[kind]
    before = read(owner)
    assert root.get() is before
    other: Any = (2,) if kind == "defaults" else torch.zeros(1)
    root.set(other)
    assert read(owner) is other
    assert root.get() is other
    if kind != "defaults":
        root.set(MISSING)
        assert root.get() is MISSING
        with pytest.raises((AttributeError, KeyError, NameError)):
            read(owner)
    root.set(before)
    assert read(owner) is before


def test_a_place_whose_owner_is_gone_holds_nothing() -> None:
    """Nothing is kept alive for it, and a write does nothing."""
    holder = Holder()
    root = Root(weakref.ref(holder), "own")
    del holder
    gc.collect()
    assert root.holder() is None
    assert root.get() is MISSING
    root.set(2)
