"""walk: labels and leaves of nested values."""

from collections import UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree

from nanwatch.recording.walk import MAX_LEAVES, Unwalked, leaves

X, Y, Z = torch.zeros(1), torch.ones(2), torch.full((3,), 2.0)
Pair = namedtuple("Pair", "left right")


@dataclass
class Output:
    """A plain dataclass."""

    logits: Tensor
    loss: Tensor | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Box:
    """A type of the user's, registered with torch.utils._pytree."""

    def __init__(self, *content: Tensor) -> None:
        self.content = content


_pytree.register_pytree_node(Box, lambda box: (list(box.content), None), lambda content, _: Box(*content))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (X, [("output", X)]),
        ("text", [("output", "text")]),
        ([X, (Y, None)], [("output[0]", X), ("output[1][0]", Y), ("output[1][1]", None)]),
        ({"logits": X, 3: [Y]}, [("output[logits]", X), ("output[3][0]", Y)]),
        ({"a key": X, (1, 2): Y}, [("output['a key']", X), ("output[(1, 2)]", Y)]),
        (UserDict({"ids": X}), [("output[ids]", X)]),
        (Pair(X, {"k": Y}), [("output[0]", X), ("output[1][k]", Y)]),
        (Output(X, extra={"z": Z}), [("output[logits]", X), ("output[loss]", None), ("output[extra][z]", Z)]),
        (torch.max(torch.eye(2), 0)[:1], [("output[0]", None)]),
        (Box(X, Y), [("output[0]", X), ("output[1]", Y)]),
        ((), []),
    ],
)
def test_labels_say_how_to_reach_the_leaf(value: Any, expected: list[tuple[str, Any]]) -> None:
    found = leaves(value, "output")
    assert [label for label, _ in found] == [label for label, _ in expected]
    for (_, leaf), (_, wanted) in zip(found, expected, strict=True):
        assert leaf is wanted or wanted is None


class Slotted:
    __slots__ = ("left", "unset")

    def __init__(self, left: Tensor) -> None:
        self.left = left


@dataclass
class Late:
    logits: Tensor
    extra: Any = field(init=False)


def test_objects_are_entered_for_their_tensors() -> None:
    """Attributes, slots, sets, views and arrays, with no call of the object's own code; scalars are left out."""

    class Lazy:
        def __init__(self, **attributes: Any) -> None:
            vars(self).update(attributes)

        @property
        def broken(self) -> Tensor:
            raise AssertionError("a property was asked")

    value = {
        "own": Lazy(ids=X, size=3, inner=Lazy(mask=Y)),
        "slots": Slotted(X),
        "set": {X},
        "view": {"a": Y}.values(),
        "late": Late(Z),
        "stream": iter([X]),
    }
    found = dict(leaves(value, "output"))
    tensors = {label: x for label, x in found.items() if isinstance(x, Tensor)}
    assert list(tensors) == [
        *("output[own][ids]", "output[own][inner][mask]", "output[slots][left]", "output[set][0]"),
        *("output[view][0]", "output[late][logits]"),
    ]
    assert isinstance(found["output[late][extra]"], Unwalked)
    assert isinstance(found["output[stream]"], Unwalked)
    array = np.array([1.0, 2.0])
    array.flags.writeable = False
    ((_, x),) = leaves(array[::-1], "output")
    assert x.tolist() == [2.0, 1.0]
    ((label, leaf), *_) = leaves(Lazy(a=1), "output")
    assert (label, type(leaf)) == ("output", Lazy)
    assert [type(leaf) for _, leaf in leaves([Lazy(ids=X)], "input", False)] == [Lazy]


class Hostile(UserDict[str, Any]):
    """A mapping that fails when it is read."""

    def __getitem__(self, key: str) -> Any:
        raise KeyError(key)


def test_what_is_not_entered_is_a_leaf_that_says_why() -> None:
    """A cycle, a container that raises, and the first leaf beyond the limit; the rest is still walked."""
    value: list[Any] = [X]
    value.append(value)
    assert leaves(value, "output") == [("output[0]", X), ("output[1]", "contains itself")]
    assert leaves((Hostile(a=X), X), "output") == [("output[0]", "Hostile raised KeyError"), ("output[1]", X)]
    for width, is_bounded in ((MAX_LEAVES, False), (100_000, True)):
        is_unwalked = [isinstance(leaf, Unwalked) for _, leaf in leaves([[X] * (width // 16)] * 16, "output")]
        assert is_unwalked == [False] * MAX_LEAVES + [True] * is_bounded
