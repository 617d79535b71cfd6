"""The two recorders against each other, and both against plain forward hooks and numpy, on models made at random."""

from __future__ import annotations

import math
import random
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.utils import ModelOutput

from nanwatch.numerics import _extension
from nanwatch.recording.recorder import PythonRecorder
from nanwatch.recording.walk import MAX_DEPTH, MAX_LEAVES, MAX_SCALARS, call_leaves, leaves
from nanwatch.report.frame import Frame
from nanwatch.session.api import Watch, watch
from oracle import values_of

needs_native = pytest.mark.skipif(_extension.C is None, reason="no compiled part")
RECORDERS = [pytest.param("native", marks=needs_native), "python"]
# With all tensors on a device that does nothing before somebody waits; see conftest.py.
WITH_DEVICE = [*RECORDERS, pytest.param("device", marks=needs_native)]
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.complex64,
]
Pair = namedtuple("Pair", "left right")


@dataclass
class Plain:
    """A dataclass, as some models return."""

    first: Any = None
    rest: list[Any] = field(default_factory=list)


@dataclass
class Answer(ModelOutput):
    """What models of transformers return; a field that is None is left out."""

    loss: Any = None
    logits: Any = None
    hidden: Any = None


def watched(model: nn.Module, recorder: str, **options: Any) -> Watch:
    """A watch with that recorder."""
    if recorder != "python":
        return watch(model, _verify_hits=True, **options)
    with mock.patch("nanwatch.session.watch.make_recorder", PythonRecorder):
        return watch(model, **options)


# Random models


class Chance:
    """Random tensors and structures; the same for the same seed."""

    def __init__(self, seed: int, poison: float) -> None:
        self.random = random.Random(seed)
        self.poison = poison

    def tensor(self) -> Tensor:
        rng = self.random
        dtype = rng.choice(DTYPES)
        shape = rng.choice([(), (1,), (0,), (3,), (2, 3), (4, 0, 2), (2, 1, 5)])
        x = torch.tensor([rng.randint(0, 60) for _ in range(math.prod(shape))]).reshape(shape)
        x = (x / 4 if dtype.is_floating_point or dtype.is_complex else x).to(dtype)
        if x.numel() and rng.random() < self.poison and dtype.itemsize > 1 and dtype.is_floating_point:
            x.view(-1)[rng.randrange(x.numel())] = rng.choice([math.nan, math.inf, -math.inf])
        view = rng.choice(["", "", "t", "expand", "step", "grad"])
        if view == "t":
            return x.t() if x.dim() == 2 else x
        if view == "expand":
            return x.unsqueeze(0).expand(3, *shape)
        if view == "step" and x.dim():
            return x[::2]
        return x.requires_grad_() if view == "grad" and dtype == torch.float32 else x

    def value(self, known: list[Tensor], depth: int = 0) -> Any:
        rng = self.random
        kinds = ["known", "tensor", "scalar"] + (["container"] * 3 if depth < 3 else [])
        kind = rng.choice(kinds)
        if kind == "known" and known:
            return rng.choice(known)
        if kind == "scalar":
            return rng.choice([None, 3, 2.5, "text", b"raw", True, object, range(2), torch.float16])
        if kind != "container":
            known.append(self.tensor())
            return known[-1]
        items = [self.value(known, depth + 1) for _ in range(rng.randint(0, 4))]
        keys = rng.sample(["logits", "loss", "a key", "ü", "x.y", "0"], len(items))
        make = rng.choice([tuple, list, dict, "keyed", OrderedDict, UserDict, Plain, Answer, Pair, "mixed"])
        if make in (dict, OrderedDict, UserDict):
            return make(zip(keys, items, strict=True))
        if make == "keyed":
            return dict(zip([(1, 2), 3, None, "k"], items, strict=False))
        if make is Plain:
            return Plain(items[0] if items else None, items[1:])
        if make is Answer:
            return Answer(*[item for item in items[:3] if item is not None])
        if make is Pair:
            return Pair(items, None)
        return [*items, tuple(items)] if make == "mixed" else make(items)


class Branch(nn.Module):
    """Calls some of its children, now and then more than once, with random arguments, and returns something."""

    def __init__(self, chance: Chance, calls: int) -> None:
        super().__init__()
        self.chance, self.calls = chance, calls
        self.again: list[Branch] = []  # calls itself through this, no child
        if chance.random.random() < 0.5:
            self.weight = nn.Parameter(torch.tensor([chance.random.random(), 2.0]))
        if chance.random.random() < 0.3:
            self.register_buffer("table", torch.arange(3.0) + 1)
            self.register_buffer("count", torch.tensor(3))

    def forward(self, *args: Any, depth: int = 0, **kwargs: Any) -> Any:
        chance = self.chance
        known = [x for _, x in leaves((args, kwargs), "") if isinstance(x, Tensor)]
        children = [child for child in self.children() if isinstance(child, Branch)] + self.again
        for _ in range(self.calls if depth < 4 else 0):
            if not children:
                break
            arguments = [chance.value(known) for _ in range(chance.random.randint(0, 2))]
            keywords = {"mask": chance.value(known)} if chance.random.random() < 0.4 else {}
            result = chance.random.choice(children)(*arguments, depth=depth + 1, **keywords)
            known += [x for _, x in leaves(result, "") if isinstance(x, Tensor)]
        if known and chance.random.random() < 0.2:
            x = chance.random.choice(known)
            if x.dtype == torch.float32 and not x.requires_grad and x.is_contiguous() and x.numel() > 1:
                x.mul_(2)
        return chance.value(known)


def tree(seed: int, poison: float) -> Branch:
    """A tree of up to a dozen modules, some of them shared, some calling themselves."""
    chance = Chance(seed, poison)
    rng = chance.random
    modules = [Branch(chance, rng.randint(1, 3)) for _ in range(rng.randint(1, 8))]
    for number, module in enumerate(modules[1:], 1):
        for parent in rng.sample(modules[:number], min(number, rng.choice([1, 1, 2]))):
            parent.add_module(f"m{number}", module)
    if rng.random() < 0.5:
        again = rng.choice(modules)
        again.again.append(again)
    return modules[0]


# The obvious recorder

Row = tuple[str, str, Any, Any, Any]  # label, dtype, abs_min, abs_max, isfinite


def obvious(model: nn.Module) -> tuple[list[tuple[str, list[Row]]], Callable[[], None]]:
    """Frames by forward hooks, read with numpy through float64; and what takes the hooks off."""
    frames: list[tuple[str, list[Row]]] = []
    handles = []
    for name, module in model.named_modules():

        def hook(module: nn.Module, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
            rows = [row(label, x) for label, x in module.named_parameters(recurse=False)]
            rows += [
                row(label, x) for label, x in module.named_buffers(recurse=False) if x.is_floating_point()
            ]
            rows += [row(label, x) for i, arg in enumerate(args) for label, x in flat(arg, f"input[{i}]")]
            rows += [row(label, x) for key, arg in kwargs.items() for label, x in flat(arg, f"input[{key}]")]
            frames.append((name, rows + [row(label, x) for label, x in flat(output, "output")]))

        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    return frames, lambda: [handle.remove() for handle in handles] and None


def flat(value: Any, label: str) -> Iterator[tuple[str, Any]]:
    """What is in a value, by the label grammar of the docs, without any limit."""
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


def row(label: str, x: Any) -> Row:
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


def rows_of(frame: Frame) -> list[Row]:
    """A frame's records in the same form."""
    return [(r.label, r.dtype, r.abs_min, r.abs_max, r.isfinite) for r in frame.records]


def run(model: nn.Module, seed: int) -> None:
    """Two batches; the same for the same seed."""
    assert isinstance(model, Branch)
    for batch in range(2):
        model.chance.random.seed(seed + batch)
        model(model.chance.tensor(), {"again": [model.chance.tensor()]}, mask=None)


@needs_native
@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), poison=st.sampled_from([0.0, 0.02, 0.3]))
def test_both_recorders_see_what_hooks_see(seed: int, poison: float) -> None:
    """Same frames, labels, dtypes and ranges, same first fault, and no stale hit, whatever is nested in what."""
    model = tree(seed, poison)
    frames, remove = obvious(model)
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
    faults = [(f.batch, f.name, f.fault.label) for f in found["python"] if f.fault is not None]
    for report in reports.values():
        finding = report.finding
        assert (finding and (finding.batch, finding.module, finding.label)) == (faults[0] if faults else None)


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
    notes = [record.note.removeprefix("not checked: ") for record in w.frames[0].records]
    known = ["None" if x is None else "" if isinstance(x, Tensor) else str(x) for _, x in expected]
    assert [n for n in notes if n not in ("not a tensor", "")] == [
        text
        for text, (_, x) in zip(known, expected, strict=True)
        if text and (x is None or type(x) is not str) and type(x).__name__ in ("Unwalked", "NoneType")
    ]


@pytest.mark.parametrize("recorder", RECORDERS)
def test_frames_since_are_the_latest_of_those_that_came_later(recorder: str) -> None:
    """Whatever number was asked for, and however many of them the ring has let go."""
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
    """Of weights, inputs and outputs, finite or not, of any layout, those that numpy counts."""

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


@pytest.mark.parametrize("recorder", RECORDERS)
def test_counts_change_nothing_else(recorder: str) -> None:
    """Frames, gradients' frames, findings and the trained weights are the same but for the counts."""

    def trained(counts: bool) -> tuple[list[Frame], dict[str, Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        with watched(model, recorder, counts=counts, gradients=True, max_frames=100) as watch:
            for _ in range(3):
                model(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return list(watch.frames), model.state_dict()

    plain, counted = trained(False), trained(True)
    assert all(torch.equal(plain[1][name], counted[1][name]) for name in plain[1])
    records = [record for frame in counted[0] for record in frame.records]
    assert all(record.health is not None for record in records)
    assert any(record.role == "gradient" for record in records)
    assert [
        replace(frame, records=tuple(replace(record, health=None) for record in frame.records))
        for frame in counted[0]
    ] == plain[0]
