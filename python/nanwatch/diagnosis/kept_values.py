"""Values of the program as functions that bring them back.

A kept value takes the present value and returns what to put in its place. Lists, dicts, sets, deques and arrays are
refilled, so that all who hold them see it.
"""

from __future__ import annotations

import copy
import functools
import os
import random
import threading
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .outside import COPIED_ITERATORS, in_child
from .places import MISSING
from .reachable import OF_ATTRIBUTES

Kept = Callable[[Any], Any]
# Clones of small tensors by id: the tensor, its version and the clone.
Clones = dict[int, tuple[weakref.ref[Tensor], int, Tensor]]

_ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of what is kept: elements of a container, bytes of an array or tensor.

    `strong`: keep what the program may drop meanwhile.
    """

    elements: int
    nbytes: int
    strong: bool = False


NOW = Limits(100_000, 1 << 26, strong=True)


def _same(value: Any) -> Kept:
    return lambda _: value


def _unchanged(present: Any) -> Any:
    return present


_CONTAINERS = (list, dict, set, deque, bytearray)


# Ids of values that stay as they are: another thread may put something into them meanwhile, or wait for them.
_spared: frozenset[int] = frozenset()


@contextmanager
def spared(ids: frozenset[int]) -> Iterator[None]:
    """Leave containers and conditions with these ids as they are in the block."""
    global _spared
    before, _spared = _spared, ids
    try:
        yield
    finally:
        _spared = before


def keep_value(value: Any, limits: Limits, tensors: Clones, depth: int = 0) -> Kept:
    """Return how the value comes back; what is past the limits stays as it is then."""
    kind = type(value)
    if kind in _ATOMS or value is MISSING or depth > 6:
        return _same(value)
    if isinstance(value, Tensor):
        return keep_tensor(value, limits, tensors)
    if kind is tuple:
        return _tuple(value, limits, tensors, depth)
    if isinstance(value, _CONTAINERS):
        return _container(value, limits, tensors, depth)
    if kind in _LOCKS:
        return _lock(value)
    if isinstance(value, np.ndarray):  # a memmap too
        return _array(value, limits)
    if kind in COPIED_ITERATORS:
        kept = copy.copy(value)
        return lambda present: value if limits.strong and _advance_to(value, kept) else copy.copy(kept)
    found = _stateful(value)
    if found is not None:
        return found
    if kind.__module__ in OF_ATTRIBUTES and hasattr(value, "__dict__"):
        inner = {name: keep_value(one, limits, tensors, depth + 1) for name, one in vars(value).items()}
        return lambda _: _with_attributes(value, inner)
    return _reference(value, limits)


def _advance_to(value: Any, kept: Any) -> bool:
    """Return whether the iterator still stands where it stood."""
    return bool(value.__reduce__() == kept.__reduce__())


def _with_attributes(value: Any, inner: dict[str, Kept]) -> Any:
    if id(value) in _spared:
        return value
    own = vars(value)
    for name, kept in inner.items():
        own[name] = kept(own.get(name, MISSING))
    return value


def _holder(value: Any, limits: Limits) -> Callable[[], Any]:
    """Return a function that returns the value, or None where it is gone."""
    return (lambda: value) if limits.strong else weakref.ref(value)


def _reference(value: Any, limits: Limits) -> Kept:
    try:
        own = _holder(value, limits)
    except TypeError:
        return _same(value)
    return lambda present: present if (one := own()) is None else one


def keep_tensor(x: Tensor, limits: Limits, tensors: Clones) -> Kept:
    """Return how the tensor comes back: itself, with its values and its version."""
    is_plain = type(x) in (Tensor, nn.Buffer, nn.Parameter) and x.layout is torch.strided
    is_kept = limits.strong or (is_plain and not x.is_inference() and not x.requires_grad)
    # Elements that share their memory cannot be written to, neither by a forward nor here.
    is_shared = x.layout is torch.strided and torch._debug_has_internal_overlap(x) == 1
    if not is_kept or is_shared or x.is_meta or x.numel() * x.element_size() > limits.nbytes:
        return _reference(x, limits)
    version = None if x.is_inference() else x._version
    known = tensors.get(id(x))
    if known is not None and known[0]() is x and known[1] == version:
        clone = known[2]
    else:
        clone = x.detach().clone()
        if not limits.strong:
            tensors[id(x)] = weakref.ref(x), x._version, clone
    held = _holder(x, limits)

    def restored(present: Any) -> Any:
        own = held()
        if own is None:
            return clone.clone()
        now = None if version is None else own._version
        # BatchNorm writes its statistics past the version counter.
        if now != version or (limits.strong and not torch.equal(own, clone)):
            with torch.inference_mode() if version is None else torch.no_grad():
                own.copy_(clone)
            if version is not None:
                torch._C._autograd._unsafe_set_version_counter((own,), (version,))
        return own

    return restored


def _tuple(value: tuple[Any, ...], limits: Limits, tensors: Clones, depth: int) -> Kept:
    parts = [keep_value(one, limits, tensors, depth + 1) for one in value]
    number, held = id(value), value if limits.strong or all(type(one) in _ATOMS for one in value) else None

    def restored(present: Any) -> Any:
        same = held if held is not None else present if id(present) == number else None
        made = tuple(part(one) for part, one in zip(parts, same or (MISSING,) * len(parts), strict=True))
        return same if same is not None and all(a is b for a, b in zip(made, same, strict=True)) else made

    return restored


def _container(value: Any, limits: Limits, tensors: Clones, depth: int) -> Kept:
    length = len(value)
    if length > limits.elements:
        return (lambda present: _truncated(present, length)) if isinstance(value, list) else _unchanged
    refill: Callable[[Any], None]
    if isinstance(value, bytearray):
        refill = functools.partial(_refill_bytes, content=bytes(value))
    elif isinstance(value, set):
        refill = functools.partial(_refill_set, members=frozenset(value))
    elif isinstance(value, dict):
        items = _base(value).items(value)
        pairs = [(key, keep_value(one, limits, tensors, depth + 1)) for key, one in items]
        refill = functools.partial(_refill_dict, pairs=pairs)
    else:
        refill = functools.partial(
            _refill, items=[keep_value(one, limits, tensors, depth + 1) for one in value]
        )
    # Without `strong` the container is not held, as it may hold the tensors of the batch before.
    number, held, empty = id(value), value if limits.strong else None, _empty(value)

    def restored(present: Any) -> Any:
        one = held if held is not None else present if id(present) == number else empty()
        if id(one) not in _spared:
            refill(one)
        return one

    return restored


def _empty(value: Any) -> Callable[[], Any]:
    """Return a function that makes an empty container of the same kind."""
    if isinstance(value, defaultdict):
        return functools.partial(type(value), value.default_factory)
    return functools.partial(deque, (), value.maxlen) if isinstance(value, deque) else type(value)


def _refill_bytes(one: bytearray, content: bytes) -> None:
    one[:] = content


def _refill_set(one: set[Any], members: frozenset[Any]) -> None:
    if one != members:
        set.clear(one)
        set.update(one, members)


def _base(one: dict[Any, Any]) -> Any:
    """Return the class that knows the order of the keys, past what the program has overridden."""
    return OrderedDict if isinstance(one, OrderedDict) else dict


def _refill_dict(one: dict[Any, Any], pairs: list[tuple[Any, Kept]]) -> None:
    items = [(key, kept(dict.get(one, key, MISSING))) for key, kept in pairs]
    base = _base(one)
    if [key for key, _ in items] == [*base.keys(one)] and all(dict.get(one, key) is x for key, x in items):
        return
    base.clear(one)
    for key, x in items:
        if x is not MISSING:
            base.__setitem__(one, key, x)


def _refill(one: Any, items: list[Kept]) -> None:
    now = list(one)
    made = [kept(now[i] if i < len(now) else MISSING) for i, kept in enumerate(items)]
    made = [x for x in made if x is not MISSING]
    if len(made) == len(now) and all(a is b for a, b in zip(made, now, strict=True)):
        return
    if isinstance(one, list):
        list.__setitem__(one, slice(None), made)
    else:
        deque.clear(one)
        deque.extend(one, made)


def _truncated(present: Any, length: int) -> Any:
    if isinstance(present, list) and len(present) > length and id(present) not in _spared:
        list.__delitem__(present, slice(length, None))
    return present


def _array(value: Any, limits: Limits) -> Kept:
    if value.nbytes > limits.nbytes or value.dtype.hasobject:
        return _reference(value, limits)
    content, held = value.copy(), _holder(value, limits)

    def restored(present: Any) -> Any:
        own = held()
        if own is None:
            return content.copy()
        if own.flags.writeable and own.shape == content.shape and own.tobytes() != content.tobytes():
            own[...] = content
        return own

    return restored


def _lock(value: Any) -> Kept:
    is_held = getattr(value, "locked", lambda: False)()

    def restored(_: Any) -> Any:
        # Only in a child: there no other thread is left that could release it.
        if in_child() and not is_held:
            value._at_fork_reinit()
        return value

    return restored


def _stateful(value: Any) -> Kept | None:
    """Return how a generator of random numbers, a context variable or the environment comes back, else None."""
    for kinds, read, write in _STATEFUL:
        if isinstance(value, kinds):
            return functools.partial(_with_state, value, write, read(value))
    return None


def _with_state(value: Any, write: Callable[[Any, Any], Any], state: Any, _: Any) -> Any:
    write(value, state)
    return value


def _set_environment(environment: Any, content: dict[str, str]) -> None:
    for name in environment.keys() - content.keys():
        del environment[name]
    environment.update({name: x for name, x in content.items() if environment.get(name) != x})


# Kinds of values with a state of their own, and how it is read and written. A context variable that had no value keeps
# what it has: only a token would take that away.
_STATEFUL: tuple[tuple[Any, Callable[[Any], Any], Callable[[Any, Any], Any]], ...] = (
    (random.Random, random.Random.getstate, random.Random.setstate),
    ((np.random.RandomState, torch.Generator), lambda x: x.get_state(), lambda x, state: x.set_state(state)),
    (np.random.Generator, lambda x: x.bit_generator.state, lambda x, s: setattr(x.bit_generator, "state", s)),
    (type(os.environ), dict, _set_environment),
    (ContextVar, lambda x: x.get(MISSING), lambda x, state: None if state is MISSING else x.set(state)),
)
