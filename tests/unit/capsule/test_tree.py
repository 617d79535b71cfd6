"""A call's arguments as a tree: values left out, with the reason, and classes that stay names until requested."""

from __future__ import annotations

import enum
import sys
import threading
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nanwatch.capsule.tree import MAX_DEPTH, LeftOut, Structure
from support.capsules import round_trip, same

pytest.importorskip("safetensors")


class Mode(enum.Enum):
    FAST = "fast"


class Level(enum.IntEnum):
    HIGH = 3


def test_subclasses_of_plain_values_are_what_they_derive_from():
    """An IntEnum is its int, numpy's float64 a float; nothing of their classes is kept."""
    capsule = round_trip(Level.HIGH, np.float64(0.1))
    assert same(list(capsule.args), [3, 0.1])


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({1, 2}, "set"),
        (Mode.FAST, "Mode"),
        (threading.Lock(), "lock"),
        (b"x", "bytes"),
        (1 << 5000, "int"),
        ("x" * 100_000, "str"),
        (torch.ones(2, device="meta"), "Tensor"),
        (torch.eye(2).to_sparse(), "Tensor"),
        ({threading.Lock(): 1}, "dict"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_kept_is_named_with_its_type(value, kind):
    """The value is a LeftOut in its place and in the list, and everything beside it is kept."""
    capsule = round_trip([1, value], x=torch.ones(1))
    (left,) = capsule.left_out
    assert capsule.args[0] == [1, left]
    assert isinstance(left, LeftOut)
    assert left.what.startswith("input[0][1]")
    assert left.type.endswith(kind)
    assert left.why
    assert same(capsule.kwargs, {"x": torch.ones(1)})


def test_values_that_never_end_are_cut():
    """A list in itself, one too deep, and a mapping that raises are left out where they begin to be so."""

    class Bad(dict):
        def __iter__(self):
            raise RuntimeError("no")

    loop: list[Any] = [1]
    loop.append(loop)
    deep: list[Any] = []
    for _ in range(MAX_DEPTH + 5):
        deep = [deep]
    whys = [one.why for one in round_trip(loop, deep, Bad(a=1)).left_out]
    assert whys == [
        "contains itself",
        f"nested deeper than {MAX_DEPTH}",
        "raised RuntimeError when it was read",
    ]


def test_a_structure_imports_nothing_and_runs_no_code_of_the_class():
    """A class whose module is not imported, lies behind a module's __getattr__, or has other fields, is not built."""
    assert "this.module" not in sys.modules
    called = []

    @dataclass
    class Loud:
        x: int

        def __post_init__(self) -> None:
            called.append(self.x)

    @dataclass
    class Number(int):
        x: int

    lazy = type(sys)("lazy_for_test")
    lazy.__getattr__ = called.append  # type: ignore[method-assign]
    holder = type(sys)("holder_for_test")
    holder.Loud, holder.Number = Loud, Number
    sys.modules |= {"lazy_for_test": lazy, "holder_for_test": holder}
    try:
        built = Structure("dataclass", "holder_for_test", "Loud", {"x": 1}).build()
        assert (type(built), built.x) == (Loud, 1)
        for module, name, held in [
            ("this.module", "Thing", {}),
            ("antigravity", "fly", {}),
            ("lazy_for_test", "Loud", {"x": 1}),
            ("holder_for_test", "Loud", {"x": 1, "y": 2}),
            ("holder_for_test", "Loud.x", {}),
            ("holder_for_test", "Number", {"x": 1}),  # Python makes no number without its __new__
            ("subprocess", "Popen", {"args": "true"}),
            ("builtins", "eval", {}),
        ]:
            with pytest.raises(LookupError, match=f"{module}.{name}: "):
                Structure("dataclass", module, name, held).build()
    finally:
        del sys.modules["lazy_for_test"], sys.modules["holder_for_test"]
    assert called == []
    assert "antigravity" not in sys.modules


def test_a_namespace_is_no_structure():
    """Only what says which fields it has is taken apart."""
    assert [one.type for one in round_trip(SimpleNamespace(x=1)).left_out] == ["types.SimpleNamespace"]
