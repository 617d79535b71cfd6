"""Walk over the tensors inside nested Python values, each with a label that says how to reach it.

Label grammar: the word of the whole (`input`, `output`), then one pair of brackets for every level: a position in a
tuple, list, set or view of a dict (`output[1][0]`), a key of a mapping (`output[logits]`), a field of a dataclass or an
attribute of another object (`input[mask]`), or the name that a type registered with torch.utils._pytree gives its
children. The positional arguments of a call are
`input[0]`, `input[1]`, ..., its keyword arguments `input[attention_mask]`. A single value keeps the word alone.
"""

from __future__ import annotations

import copyreg
import itertools
import re
import sys
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, MappingView, Set
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree

from ..util.messages import suppressing

# A model that returns every layer's attention of a long generation has some thousand tensors; beyond that a
# value is data in Python lists, not activations, and looking at each would cost more than the model.
MAX_LEAVES = 4096
MAX_DEPTH = 32
# A longer list that holds plain scalars only, such as token ids, is one value.
MAX_SCALARS = 64
# An object that holds more does not have its attributes to hand over tensors.
MAX_OBJECTS = 64

SCALARS = (int, float, str, bytes, type(None))
_PLAIN_KEY = re.compile(r"[\w.\-/]{1,80}")


class Unwalked(str):
    """Placeholder for a part of a value that was not entered; the text says why."""

    __slots__ = ()


Leaf: TypeAlias = tuple[str, Any]


def leaves(
    value: Any,
    label: str,
    objects: bool = True,
    given: Iterable[object] = (),
    inside: tuple[int, ...] = (),
    num_before: int = 0,
) -> list[Leaf]:
    """Return `(label, leaf)` for everything in `value`, in its own order, at most MAX_LEAVES.

    A leaf is a tensor, None, any other object that is no container, or Unwalked where a limit or a cycle
    ended the walk. Nothing here raises: a container that cannot be read is an Unwalked leaf with the reason.
    `objects`: of objects of other classes, at most MAX_OBJECTS, the attributes that may hold tensors are entered,
    unless the object is one of those `given` to the call, such as a key-value cache.
    `inside`, the ids of the containers around the value, and `num_before`, the leaves there, count for the limits.
    """
    walk = _Walk(objects, given, MAX_LEAVES - num_before)
    walk.enter(value, label, inside)
    return walk.leaves


def call_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any], *, objects: bool = True) -> list[Leaf]:
    """Return the leaves of a call's positional, then its keyword arguments."""
    walk = _Walk(objects)
    for key, value in (*enumerate(args), *kwargs.items()):
        walk.enter(value, f"input[{spell_key(key)}]")
    return walk.leaves


class _Walk:
    """Leaves that a walk has met so far."""

    def __init__(self, objects: bool, given: Iterable[object] = (), most: int = MAX_LEAVES) -> None:
        self.leaves: list[Leaf] = []
        self._objects, self._most = objects, most
        self._num_objects = 0
        self._given = frozenset(map(id, given))

    def enter(self, value: Any, label: str, inside: tuple[int, ...] = ()) -> None:
        """Add the leaves of a value. `inside` are the ids of the containers around it."""
        children = None
        if not isinstance(value, (torch.Tensor, *SCALARS)):
            try:
                value, children = self._open(value, inside)
            except Exception as error:
                # A container of the user's own may do anything when asked for its items.
                value = Unwalked(f"{type(value).__name__} raised {type(error).__name__}")
        if children is None:
            self.leaves.append((label, value))
        for key, child in children or ():
            if len(self.leaves) >= self._most:
                if not (self.leaves and isinstance(self.leaves[-1][1], Unwalked)):
                    self.leaves.append((label, Unwalked(f"more than {MAX_LEAVES} values")))
                return
            self.enter(child, f"{label}[{key}]", (*inside, id(value)))

    def _open(self, value: Any, inside: tuple[int, ...]) -> tuple[Any, list[tuple[object, Any]] | None]:
        """Return the leaf that the value stands for; beside it the items of a container, or an object's attributes."""
        if isinstance(value, _STREAMS):
            return Unwalked(f"{type(value).__name__}, whose values belong to the caller"), None
        if isinstance(value, _arrays()):
            if not value.flags.writeable or min(value.strides, default=0) < 0:
                value = value.copy()  # PyTorch refuses the one and warns of the other
            return torch.from_numpy(value), None
        children = _items(value)
        if children is None and self._objects and id(value) not in self._given:
            children = _attributes(value)
            self._num_objects += children is not None
            if children is not None and self._num_objects > MAX_OBJECTS:
                return Unwalked(f"more than {MAX_OBJECTS} objects"), None
        if children is None:
            return value, None
        if id(value) in inside:
            return Unwalked("contains itself"), None
        if len(inside) == MAX_DEPTH:
            return Unwalked(f"nested deeper than {MAX_DEPTH}"), None
        return value, children


_STREAMS = (Iterator, AsyncIterator, Coroutine)


def _arrays() -> tuple[Any, ...]:
    """Return NumPy's class of arrays, if anybody has imported NumPy."""
    numpy = sys.modules.get("numpy")
    return () if numpy is None else (numpy.ndarray,)


def _items(value: Any) -> list[tuple[object, Any]] | None:
    """Return `(key, child)` pairs of a container, or None for any other value."""
    if isinstance(value, tuple | list):
        if len(value) > MAX_SCALARS and all(isinstance(item, SCALARS) for item in value):
            return None
        # One more than the limit is enough to see that there are more.
        return list(enumerate(value[: MAX_LEAVES + 1]))
    if isinstance(value, Set | MappingView):
        items = list(itertools.islice(value, MAX_LEAVES + 1))  # type: ignore[arg-type]
        return None if all(isinstance(item, SCALARS) for item in items) else list(enumerate(items))
    if isinstance(value, Mapping):
        return [(spell_key(key), value[key]) for key in value]
    if is_dataclass(value) and not isinstance(value, type):
        return [(field.name, getattr(value, field.name, Unwalked("not set"))) for field in fields(value)]
    node = _pytree.SUPPORTED_NODES.get(type(value))
    return None if node is None else list(enumerate(node.flatten_fn(value)[0]))


def is_container(kind: type) -> bool:
    """Return whether `leaves` without `objects` may find something inside values of this type."""
    kinds = (tuple, list, Mapping, Set, MappingView, *_STREAMS, *_arrays())
    return issubclass(kind, kinds) or is_dataclass(kind) or kind in _pytree.SUPPORTED_NODES


# Their attributes are theirs, and no values of a call.
_NEVER_ENTERED = (type, ModuleType, torch.nn.Module, torch.optim.Optimizer)


def _attributes(value: Any) -> list[tuple[object, Any]] | None:
    """Return the attributes of an object that may hold tensors; None where there are none."""
    kind = type(value)
    if isinstance(value, _NEVER_ENTERED) or callable(value) or is_container(kind):
        return None
    named: dict[str, Any] = {}
    with suppressing("the attributes of an object could not be read"):
        named = {name: getattr(value, name) for name in copyreg._slotnames(kind) if hasattr(value, name)}  # type: ignore[attr-defined]
        if kind.__dictoffset__:
            named |= object.__getattribute__(value, "__dict__")
    return [(name, x) for name, x in named.items() if not isinstance(x, SCALARS)] or None


def spell_key(key: object) -> str:
    """Return the text between the brackets of a label."""
    if isinstance(key, str) and _PLAIN_KEY.fullmatch(key):
        return key
    shown = repr(key)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
