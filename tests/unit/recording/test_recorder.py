"""The two recorders against each other, and both against plain forward hooks and numpy, on models made at random."""

from __future__ import annotations

import math
from collections import OrderedDict, UserDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nanwatch.recording.walk import MAX_DEPTH, MAX_LEAVES, MAX_SCALARS, call_leaves, leaves
from nanwatch.records.record import Frame
from support.oracle import values_of
from support.random_trees import Plain, run, tree
from support.recorders import RECORDERS, needs_native, watched

# Random models


# The obvious recorder

Record = tuple[str, str, Any, Any, Any]  # label, dtype, abs_min, abs_max, isfinite


def obvious(model: nn.Module) -> tuple[list[tuple[str, list[Record]]], list[set[int]], Callable[[], None]]:
    """Frames by forward hooks, read with numpy through float64; the calls inside each; and what takes the hooks off."""
    frames: list[tuple[str, list[Record]]] = []
    inside: list[set[int]] = []
    begun: list[int] = []  # how many frames there were when each open call began
    handles = []
    for name, module in model.named_modules():

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            rows = [row(label, x) for label, x in module.named_parameters(recurse=False)]
            rows += [
                row(label, x) for label, x in module.named_buffers(recurse=False) if x.is_floating_point()
            ]
            rows += [row(label, x) for i, arg in enumerate(args) for label, x in flat(arg, f"input[{i}]")]
            rows += [row(label, x) for key, arg in kwargs.items() for label, x in flat(arg, f"input[{key}]")]
            inside.append(set(range(begun.pop(), len(frames) + 1)))
            frames.append((name, rows + [row(label, x) for label, x in flat(output, "output")]))

        handles.append(module.register_forward_pre_hook(lambda *_: begun.append(len(frames))))
        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    return frames, inside, lambda: [handle.remove() for handle in handles] and None


def flat(value: Any, label: str) -> Iterator[tuple[str, Any]]:
    """Return all leaves of a value, by the label grammar of the docs, without any limit."""
    children: Any = None
    if isinstance(value, tuple | list):
        children = enumerate(value)
    elif isinstance(value, dict | UserDict):
        plain = ("logits", "loss", "hidden", "again", "x.y", "0", "k", "ü")
        children = [(key if key in plain else repr(key), child) for key, child in value.items()]
    elif isinstance(value, Plain):
        children = [("first", value.first), ("rest", value.rest)]
    if children is None:
        yield label, value
    else:
        for key, child in children:
            yield from flat(child, f"{label}[{key}]")


def row(label: str, x: Any) -> Record:
    """One row; None where there is no tensor."""
    if not isinstance(x, Tensor):
        return label, "", None, None, None
    x = x.detach()
    values = np.abs(x.abs().numpy().astype(np.float64) if x.is_complex() else values_of(x)).ravel()
    dtype = str(x.dtype).removeprefix("torch.")
    if not values.size:
        return label, dtype, math.inf, 0.0, True
    low, high = float(values.min()), float(values.max())
    return label, dtype, low, high, bool(np.isfinite(values).all())


def rows_of(frame: Frame) -> list[Record]:
    """A frame's records in the same form."""
    return [(r.label, r.dtype, r.abs_min, r.abs_max, r.isfinite) for r in frame.records]


@needs_native
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), poison=st.sampled_from([0.0, 0.02, 0.3]))
@example(seed=2960956302, poison=0.3)  # a call that doubles what it was given, in place
@example(seed=1230, poison=0.3)  # a module that two others call
def test_both_recorders_see_what_hooks_see(seed: int, poison: float) -> None:
    """Same frames, labels, dtypes and ranges, same first fault, and no stale hit, whatever is nested in what."""
    model = tree(seed, poison)
    frames, inside, remove = obvious(model)
    run(model, seed)
    remove()
    found, reports = {}, {}
    for recorder in ("native", "python"):
        with watched(model, recorder, max_frames=100_000, on_nonfinite="record") as w:
            run(model, seed)
        found[recorder], reports[recorder] = w.frames, w.report()
        assert w.counters.get("stale_hits", 0) == 0
    # repr: so that nan equals nan.
    assert repr(found["native"]) == repr(found["python"])
    assert repr([(f.name, rows_of(f)) for f in found["native"]]) == repr(frames)
    places = [
        None if (finding := report.finding) is None else (finding.batch, finding.module, finding.label)
        for report in reports.values()
    ]
    assert places[0] == places[1]
    # The first fault, or what a call around it had been given: inside, another tensor of that call may have become bad.
    first = next((number for number, frame in enumerate(found["python"]) if frame.fault is not None), None)
    around = [frame for frame, calls in zip(found["python"], inside, strict=True) if first in calls]
    bad = [(f.batch, f.name, r.label) for f in around for r in f.records if r.is_fault]
    assert places[0] in (bad if bad else [None])


# The limits of the walk


class Takes(nn.Module):
    """Takes anything and returns it, or nothing."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else None


def deep(levels: int, make: Any = lambda x: [x]) -> Any:
    """A tensor in so many containers."""
    value: Any = torch.ones(1)
    for _ in range(levels):
        value = make(value)
    return value


def cyclic() -> list[Any]:
    """A list that holds itself, between two tensors."""
    value: list[Any] = [torch.ones(1)]
    value += [value, {"inner": (value, torch.zeros(1))}]
    return value


class Angry(UserDict):  # type: ignore[type-arg]
    """A mapping that cannot be read."""

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("no")


LIMITS: dict[str, Callable[[], Any]] = {
    "deepest list": lambda: deep(MAX_DEPTH),
    "too deep a list": lambda: deep(MAX_DEPTH + 1),
    "too deep a dict": lambda: deep(MAX_DEPTH + 1, lambda x: {"k": x}),
    "too deep, mixed": lambda: deep(MAX_DEPTH + 2, lambda x: OrderedDict(k=x)),
    "cycle": cyclic,
    "as many leaves as may be": lambda: [torch.ones(1)] * MAX_LEAVES,
    "one more": lambda: [torch.ones(1)] * (MAX_LEAVES + 1),
    "many more": lambda: {"a": [torch.ones(1)] * 3000, "b": (torch.ones(1),) * 3000},
    "limit inside": lambda: [[torch.ones(1)] * MAX_LEAVES, [torch.ones(1)] * 2, None],
    "many empty lists": lambda: [[] for _ in range(2 * MAX_LEAVES)],
    "short scalars": lambda: list(range(MAX_SCALARS)),
    "long scalars": lambda: list(range(MAX_SCALARS + 1)),
    "long scalars with a tensor": lambda: [*range(MAX_SCALARS), torch.ones(1)],
    "angry": lambda: [Angry({"k": torch.ones(1)}), torch.ones(1)],
    "opaque": lambda: [iter([1]), object(), slice(0, 2), {1, 2}],
    "empty": lambda: [(), [], {}, OrderedDict()],
    "long key": lambda: {"k" * 300: torch.ones(1), "two words": torch.ones(1)},
}


@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("make", LIMITS.values(), ids=LIMITS)
def test_the_walk_of_a_call_is_that_of_leaves(make: Callable[[], Any], recorder: str) -> None:
    """At cycles, depths, long lists and unreadable containers each recorder has the labels of walk.leaves."""
    value = make()
    model = Takes()
    with watched(model, recorder) as w:
        model(value)
    expected = call_leaves((value,), {}) + leaves(value, "output")
    assert [record.label for record in w.frames[0].records] == [label for label, _ in expected]
    notes = [str(record.note or "").removeprefix("not checked: ") for record in w.frames[0].records]
    known = ["None" if x is None else "" if isinstance(x, Tensor) else str(x) for _, x in expected]
    assert [n for n in notes if n not in ("not a tensor", "")] == [
        text
        for text, (_, x) in zip(known, expected, strict=True)
        if text and (x is None or type(x) is not str) and type(x).__name__ in ("Unwalked", "NoneType")
    ]


@pytest.mark.parametrize("recorder", RECORDERS)
def test_frames_since_are_the_latest_of_those_that_came_later(recorder: str) -> None:
    """For any number given, and however many frames the ring has dropped."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    with watched(model, recorder, max_frames=7) as watch:
        for batches in range(5):
            made = 3 * batches  # frames of a batch: both layers and the whole
            held = watch._recorder.frames()
            assert len(held) == min(made, 7)
            for kept in range(made + 1):
                found = watch._recorder.frames_since(kept)
                assert found == (made, held[max(0, len(held) - (made - kept)) :])
            model(torch.full((1, 2), float(batches)))


@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2, torch.int8]
)
def test_counts_are_those_of_each_tensor(recorder: str, dtype: torch.dtype) -> None:
    """Weights, inputs and outputs, finite or not, of any layout, have the counts of numpy."""

    class Through(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"same": x, "half": x[:, ::2], "none": x[:0]}

    bits = torch.arange(-128, 128, dtype=torch.int8).reshape(8, 32)
    x = (bits.float() * 2.0**-20).to(dtype) if dtype.itemsize > 1 else bits.view(dtype)
    if dtype.is_floating_point:
        x[0, 0], x[7, 31] = 0.0, float("inf")
    model = Through()
    with watched(model, recorder, counts=True, on_nonfinite="record") as watch:
        for _ in range(2):  # the second time it would be known
            model(x)
    frame = watch.frames[-1]
    given = {"input[0]": x, "output[same]": x, "output[half]": x[:, ::2], "output[none]": x[:0]}
    assert {record.label for record in frame.records} == set(given)
    for record in frame.records:
        values = values_of(given[record.label])
        assert record.health is not None
        assert record.health.numel == values.size
        assert record.health.num_zero == (values == 0).sum()
        assert record.health.num_posinf == (values == np.inf).sum()
        assert record.health.num_nan == np.isnan(values).sum()
        if dtype.is_floating_point:
            small = np.abs(values) < torch.finfo(dtype).smallest_normal
            assert record.health.num_subnormal == (small & (values != 0)).sum()
        np.testing.assert_equal(record.abs_min, record.health.abs_min)  # a nan is one
        np.testing.assert_equal(record.abs_max, record.health.abs_max)
