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
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping, MappingView, Sequence, Set
from dataclasses import fields, is_dataclass
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree

from ..util.visible import suppressed

# A model that returns every layer's attention of a long generation has some thousand tensors; beyond that a
# value is data in Python lists, not activations, and looking at each would cost more than the model.
MAX_LEAVES = 4096
MAX_DEPTH = 32
# A longer list that holds plain scalars only, such as token ids, is one value.
MAX_SCALARS = 64
# An object that holds more has its attributes for other reasons than to hand over tensors.
MAX_OBJECTS = 64

SCALARS = (int, float, str, bytes, type(None))
_PLAIN_KEY = re.compile(r"[\w.\-/]{1,80}")


class Unwalked(str):
    """Placeholder for a part of a value that was not entered; the text says why."""

    __slots__ = ()


Leaf: TypeAlias = tuple[str, Any]
# A container under way: its label, its id, and what is left of its children.
_Level: TypeAlias = tuple[str, int, "Iterator[tuple[object, Any]]"]


def leaves(value: Any, label: str, objects: bool = True, given: Iterable[object] = ()) -> list[Leaf]:
    """Return `(label, leaf)` for everything in `value`, in its own order, at most MAX_LEAVES.

    A leaf is a tensor, None, any other object that is no container, or Unwalked where a limit or a cycle
    ended the walk. Nothing here raises: a container that cannot be read is an Unwalked leaf with the reason.
    `objects`: of objects of other classes, at most MAX_OBJECTS, the attributes that may hold tensors are entered,
    unless the object is one of those `given` to the call, such as a key-value cache.
    """
    if isinstance(value, torch.Tensor):
        return [(label, value)]
    found: list[Leaf] = []
    _walk(value, label, found, objects, frozenset(map(id, given)))
    return found


def call_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any], *, objects: bool = True) -> list[Leaf]:
    """Return the leaves of a call's positional, then its keyword arguments."""
    found: list[Leaf] = []
    for position, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            found.append((f"input[{position}]", value))
        else:
            _walk(value, f"input[{position}]", found, objects)
    for name, value in kwargs.items():
        _walk(value, f"input[{name}]", found, objects)
    return found


def _walk(
    value: Any, label: str, found: list[Leaf], objects: bool, given: frozenset[int] = frozenset()
) -> None:
    # A loop: each level of a recursion would take of the stack that the user's own forward may need.
    inside: list[_Level] = []
    num_objects = 0
    while True:
        attributes = _attributes(value) if objects and id(value) not in given else None
        num_objects += attributes is not None
        if num_objects > MAX_OBJECTS and attributes is not None:
            value, attributes = Unwalked(f"more than {MAX_OBJECTS} objects"), None
        children = _enter(value, label, found, inside, attributes)
        if children is not None:
            inside.append((label, id(value), iter(children)))
        while inside:
            step = next(inside[-1][2], None)
            if step is not None:
                break
            inside.pop()
        else:
            return
        parent = inside[-1][0]
        if len(found) >= MAX_LEAVES:
            if not isinstance(found[-1][1], Unwalked):
                found.append((parent, Unwalked(f"more than {MAX_LEAVES} values")))
            return
        key, value = step
        label = f"{parent}[{key}]"


def _enter(
    value: Any,
    label: str,
    found: list[Leaf],
    inside: Sequence[_Level],
    attributes: list[tuple[object, Any]] | None,
) -> list[tuple[object, Any]] | None:
    """Return the children of a container; add anything else to `found`. `inside` are the containers around it."""
    if isinstance(value, (torch.Tensor, *SCALARS)):
        found.append((label, value))
        return None
    leaf = value
    try:
        leaf = _tensor_of(value)
        children = attributes or _children(value)
    except Exception as error:
        # A container of the user's own may do anything when asked for its items.
        children, leaf = None, Unwalked(f"{type(value).__name__} raised {type(error).__name__}")
    if children is not None and any(id(value) == one for _, one, _ in inside):
        children, leaf = None, Unwalked("contains itself")
    if children is not None and len(inside) == MAX_DEPTH:
        children, leaf = None, Unwalked(f"nested deeper than {MAX_DEPTH}")
    if children is None:
        found.append((label, leaf))
    return children


def _children(value: Any) -> list[tuple[object, Any]] | None:
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
    if node is not None:
        return [(position, child) for position, child in enumerate(node.flatten_fn(value)[0])]
    return None


def is_container(kind: type) -> bool:
    """Return whether `leaves` without `objects` may find something inside values of this type."""
    return (
        issubclass(kind, tuple | list | Mapping | Set | MappingView | Iterator | AsyncIterator | Coroutine)
        or is_dataclass(kind)
        or kind in _pytree.SUPPORTED_NODES
        or ((numpy := sys.modules.get("numpy")) is not None and issubclass(kind, numpy.ndarray))
    )


def _tensor_of(value: Any) -> Any:
    """Return the tensor over the memory of a NumPy array, Unwalked for an iterator, and else the value."""
    if isinstance(value, Iterator | AsyncIterator | Coroutine):
        return Unwalked(f"{type(value).__name__}, whose values belong to the caller")
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return value
    if not value.flags.writeable or min(value.strides, default=0) < 0:
        value = value.copy()  # PyTorch refuses the one and warns of the other
    return torch.from_numpy(value)


# Their attributes are theirs, and no values of a call.
_NEVER_ENTERED = (type, ModuleType, torch.nn.Module, torch.optim.Optimizer)


def _attributes(value: Any) -> list[tuple[object, Any]] | None:
    """Return the attributes of an object that may hold tensors; None for a container, and where there are none."""
    kind = type(value)
    if isinstance(value, (torch.Tensor, *SCALARS, *_NEVER_ENTERED)) or callable(value) or is_container(kind):
        return None
    try:
        named = {name: getattr(value, name) for name in copyreg._slotnames(kind) if hasattr(value, name)}  # type: ignore[attr-defined]
        if kind.__dictoffset__:
            named |= object.__getattribute__(value, "__dict__")
    except Exception:
        suppressed("the attributes of an object could not be read")
        return None
    return [(name, x) for name, x in named.items() if not isinstance(x, SCALARS)] or None


def spell_key(key: object) -> str:
    """Return the text between the brackets of a label."""
    if isinstance(key, str) and _PLAIN_KEY.fullmatch(key):
        return key
    shown = repr(key)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
