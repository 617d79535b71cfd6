"""Values of a program that come back as they were, in the objects that the program holds."""

from __future__ import annotations

import contextvars
import os
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from nanwatch.diagnosis.kept_values import NOW, START, Limits, keep_value, spared


def cases() -> dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]]:
    """A value, a change of it in place, and what of it is compared."""
    variable = contextvars.ContextVar("variable")
    variable.set(1)
    return {
        "list": ([1, [2, 3]], lambda x: (x[1].append(4), x.pop(0)), lambda x: x),
        "dict": ({"a": 1, "b": [2]}, lambda x: (x.pop("a"), x["b"].clear(), x.update(c=3)), list),
        "order": (OrderedDict(a=1, b=2), lambda x: x.move_to_end("a"), list),
        "default": (defaultdict(list, a=[1]), lambda x: x["z"].append(1), dict),
        "set": ({1, 2}, lambda x: x.add(3), set),
        "deque": (deque([1, 2], maxlen=2), lambda x: x.append(3), list),
        "bytes": (bytearray(b"ab"), lambda x: x.extend(b"c"), bytes),
        "tensor": (torch.ones(3), lambda x: x.mul_(2), lambda x: x.tolist()),
        "array": (np.ones(3), lambda x: x.fill(2), lambda x: x.tolist()),
        "random": (random.Random(0), lambda x: x.random(), lambda x: x.getstate()),
        "generator": (np.random.default_rng(0), lambda x: x.random(), lambda x: x.bit_generator.state),
        "of torch": (torch.Generator(), lambda x: torch.rand(1, generator=x), lambda x: x.get_state().tolist()),
        "variable": (variable, lambda x: x.set(2), lambda x: x.get()),
        "tuple": (([1], torch.zeros(1)), lambda x: (x[0].append(2), x[1].add_(1)), lambda x: (x[0], float(x[1]))),
    }  # fmt: skip


@pytest.mark.parametrize("limits", [START, NOW], ids=["start", "now"])
@pytest.mark.parametrize("kind", cases())
def test_a_value_comes_back_in_its_own_object(kind: str, limits: Limits) -> None:
    """Whoever holds the object sees it as it was."""
    value, change, seen = cases()[kind]
    before = repr(seen(value))
    kept = keep_value(value, limits, {})
    change(value)
    assert repr(seen(value)) != before
    assert kept(value) is value
    assert repr(seen(value)) == before


def test_a_tensor_keeps_its_version() -> None:
    """So a graph that has saved it still runs backwards; an unchanged one is not written to."""
    x = torch.ones(2)
    y = (torch.ones(2, requires_grad=True) * x).sum()
    kept = keep_value(x, NOW, {})
    x.zero_()
    kept(x)
    assert (x.tolist(), x._version) == ([1.0, 1.0], 0)
    y.backward()


def test_an_iterator_stands_where_it_stood() -> None:
    """One that can be copied: of a list, or a count."""
    values = iter([1, 2, 3])
    next(values)
    kept = keep_value(values, NOW, {})
    next(values)
    assert list(kept(values)) == [2, 3]


def test_the_environment_has_no_new_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed one has its old value."""
    monkeypatch.setenv("NANWATCH_TEST_OLD", "1")
    monkeypatch.delenv("NANWATCH_TEST_NEW", raising=False)
    kept = keep_value(os.environ, NOW, {})
    os.environ["NANWATCH_TEST_NEW"] = "2"
    os.environ["NANWATCH_TEST_OLD"] = "2"
    kept(os.environ)
    assert (os.environ.get("NANWATCH_TEST_NEW"), os.environ["NANWATCH_TEST_OLD"]) == (None, "1")


def test_past_the_limits_a_list_is_cut_and_a_tensor_left() -> None:
    """What was appended goes; elements that were exchanged stay."""
    values, x = list(range(300)), torch.ones(2000)
    kept, kept_tensor = keep_value(values, START, {}), keep_value(x, START, {})
    values[0] = -1
    values.append(300)
    x.zero_()
    assert kept(values) == [-1, *range(1, 300)]
    assert kept_tensor(x).sum() == 0


def test_what_another_thread_reaches_is_spared() -> None:
    """It may put something in meanwhile."""
    values = [1]
    kept = keep_value(values, NOW, {})
    values.append(2)
    with spared(frozenset({id(values)})):
        assert kept(values) == [1, 2]
    assert kept(values) == [1]


def test_the_start_of_a_batch_keeps_nothing_alive() -> None:
    """A list that is gone comes back as another with its content."""
    values: list[Any] = [1, 2]
    kept = keep_value(values, START, {})
    number = id(values)
    del values
    again = kept(None)
    assert again == [1, 2]
    assert number is not None
