"""The two recorders against each other, and both against plain forward hooks and numpy, on models made at random."""

import math
import sys
from collections import Counter, OrderedDict, UserDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nanwatch.numerics import _extension
from nanwatch.recording.walk import MAX_DEPTH, MAX_LEAVES, MAX_SCALARS, Unwalked, call_leaves, leaves
from nanwatch.records.record import Frame
from nanwatch.session.api import watch as start_watch
from support.oracle import values_of
from support.random_trees import Plain, run, tree
from support.recorders import RECORDERS, needs_native, watched
from support.toys import Does, Scale

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
    findings = [report.finding for report in reports.values()]
    places = [None if x is None else (x.batch, x.module, x.label) for x in findings]
    assert places[0] == places[1]
    # The first fault, or what a call around it had been given, also a nan that this call passes on to no output.
    first = next((number for number, frame in enumerate(found["python"]) if frame.fault is not None), None)
    around = [frame for frame, calls in zip(found["python"], inside, strict=True) if first in calls]
    bad = [(f.batch, f.name, r.label) for f in around for r in f.records if r.isfinite is False]
    assert places[0] in (bad if bad else [None])


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


def ordered_cycle() -> list[Any]:
    """A list and an ordered dictionary that hold each other."""
    value: list[Any] = [torch.ones(1)]
    value.append(OrderedDict(inner=value))
    return value


class Angry(UserDict):  # type: ignore[type-arg]
    """A mapping that cannot be read."""

    def __iter__(self) -> Iterator[Any]:
        raise RuntimeError("no")


LIMITS: dict[str, Callable[[], Any]] = {
    "deepest list": lambda: deep(MAX_DEPTH),
    "too deep a list": lambda: deep(MAX_DEPTH + 1),
    "too deep, in turns": lambda: deep(MAX_DEPTH // 2 + 1, lambda x: [OrderedDict(k=x)]),
    "cycle": cyclic,
    "cycle of two kinds": ordered_cycle,
    "limit in the second": lambda: [OrderedDict((i, torch.ones(1)) for i in range(MAX_LEAVES // 2 + 1))] * 2,
    "one more": lambda: [torch.ones(1)] * (MAX_LEAVES + 1),
    "limit inside": lambda: [[torch.ones(1)] * MAX_LEAVES, [torch.ones(1)] * 2, None],
    "many empty lists": lambda: [[] for _ in range(2 * MAX_LEAVES)],
    "long scalars": lambda: list(range(MAX_SCALARS + 1)),
    "long scalars with a tensor": lambda: [*range(MAX_SCALARS), torch.ones(1)],
    "angry": lambda: [Angry({"k": torch.ones(1)}), torch.ones(1)],
    "opaque": lambda: [iter([1]), object(), slice(0, 2), {1, 2}],
    "long key": lambda: {"k" * 300: torch.ones(1), "two words": torch.ones(1)},
}


def note_of(leaf: Any) -> str:
    if isinstance(leaf, Unwalked):
        return f"not checked: {leaf}"
    return "" if isinstance(leaf, Tensor) else "None" if leaf is None else "not a tensor"


@pytest.mark.parametrize("recorder", RECORDERS)
@pytest.mark.parametrize("make", LIMITS.values(), ids=LIMITS)
def test_the_walk_of_a_call_is_that_of_leaves(make: Callable[[], Any], recorder: str) -> None:
    """At cycles, depths, long lists and unreadable containers each recorder has the labels of walk.leaves."""
    value = make()
    model = Does(lambda value, **others: value)
    with watched(model, recorder) as w:
        model(value, **{"two words": None})
    expected = call_leaves((value,), {"two words": None}) + leaves(value, "output")
    assert w.counters["tensors"] == sum(isinstance(leaf, Tensor) for _, leaf in expected)
    found = [(record.label, str(record.note or "")) for record in w.frames[0].records]
    assert found == [(label, note_of(leaf)) for label, leaf in expected]


@pytest.mark.parametrize("recorder", RECORDERS)
def test_the_start_of_a_batch_has_its_arguments_and_generators(recorder: str, monkeypatch: Any) -> None:
    """Versions one level deep, and states that it draws from, also of a stand-in for CUDA, beside a second thread."""
    monkeypatch.setattr(torch.cuda, "default_generators", (stand_in := torch.Generator().manual_seed(1),))
    a, b, c, d = (torch.ones(1) for _ in range(4))
    starts: list[Any] = []

    def forward(*args: Any, **kwargs: Any) -> None:
        if args:
            ThreadPoolExecutor(1).submit(model).result(60)
            torch.rand(1, generator=stand_in)
        inside = w._recorder.num_other_threads, w._recorder.outermost()
        starts.append(w._recorder.start() if args else inside)

    model = Does(lambda part, *args, **kwargs: part(*args, **kwargs), Does(forward))
    b.add_(1)
    with watched(model, recorder) as w:
        model(a, [b, [d]], UserDict(x=d), {"y": {"z": d}}, key={"c": c})
    inside, start = starts
    assert inside == (1, "")
    assert [(id(x), version) for x, version in start.versions] == [(id(a), 0), (id(b), 1), (id(c), 0)]
    assert torch.equal(start.cuda[0], torch.Generator().manual_seed(1).get_state())


@pytest.mark.parametrize("recorder", RECORDERS)
def test_counts_are_those_of_each_tensor(recorder: str) -> None:
    """Also of a finite one, and of one that was counted in the batch before."""
    model, x = nn.Identity(), torch.tensor([[0.0, -1.0], [1e-40, 2.0]])
    with watched(model, recorder, counts=True) as watch:
        for _ in range(2):
            model(x.T)
    for record in watch.frames[-1].records:
        assert ((health := record.health).numel, health.num_zero, health.num_subnormal) == (4, 1, 1)
        assert (health.abs_min, health.abs_max) == (record.abs_min, record.abs_max) == (0.0, 2.0)


@pytest.mark.usefixtures("each_recorder")
@pytest.mark.parametrize(
    ("max_frames", "place", "batches"), [(1, 0, 0), (3, 4, 3), (3, 29, 20), (100, 4, 20)]
)
def test_the_place_counts_what_the_ring_has_dropped(max_frames: int, place: int, batches: int) -> None:
    """The place is the number of calls that ended before in the batch, for any size of the ring and in any batch."""
    model = nn.Sequential(*(Scale(1.0) for _ in range(30)))
    with start_watch(model, on_nonfinite="record", rerun=False, max_frames=max_frames) as watch:
        for _ in range(batches):
            model(torch.ones(2))
        model[place].factor = math.nan
        model(torch.ones(2))
        finding = watch.report().finding
    assert (finding.batch, finding.module, finding.sequence) == (batches, str(place), place)


class Recurses(nn.Module):
    """Calls itself as often as it is told to."""

    def forward(self, x: Tensor, times: int) -> Tensor:
        found: Tensor = self(x, times - 1) if times else x
        return found


def deepest(model: nn.Module) -> int:
    """How often the model may call itself before the interpreter's limit."""
    low, high = 0, sys.getrecursionlimit()
    while low < high:
        middle = (low + high + 1) // 2
        try:
            model(torch.ones(1), middle)
            low = middle
        except RecursionError:
            high = middle - 1
    return low


def test_a_watched_call_takes_no_more_of_the_recursion_limit_than_a_hook() -> None:
    """A forward goes as deep as with a hook; with the compiled part as deep as unwatched."""
    plain = Recurses()
    unwatched = deepest(plain)
    with start_watch(plain, rerun=False, forecast=False):
        watched = deepest(plain)
    plain.register_forward_hook(lambda *_: None)
    hooks = deepest(plain)
    # A call costs what a hook costs. The innermost one reads its tensors, for which a few frames must be left.
    assert hooks - 1 <= watched <= unwatched
    assert _extension.C is None or watched == unwatched > hooks


@pytest.mark.usefixtures("each_recorder", "switching")
def test_trainings_in_threads_are_counted_once() -> None:
    """Four threads train one model and keep the graphs: as many batches, calls and frames as in an unwatched run."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Tanh(), nn.Linear(2, 1))
    steps, threads, outputs = 40, 4, list[Tensor]()
    options = {"on_nonfinite": "record", "rerun": True, "forecast": False, "gradients": True}
    with start_watch(model, max_frames=10_000, **options) as watch:

        def train() -> None:
            for _ in range(steps):
                outputs.append(model(torch.ones(3, 2)))
                outputs[-1].sum().backward()

        with ThreadPoolExecutor(threads) as pool:
            for training in [pool.submit(train) for _ in range(threads)]:
                training.result(120)
        frames, counters = watch.frames, watch.counters
    batches = steps * threads
    assert watch.batch == batches - 1
    assert counters["calls"] == 4 * batches
    assert Counter(one.batch for one in frames if one.phase == "forward") == dict.fromkeys(range(batches), 4)
    assert sum(one.phase == "backward" for one in frames) == 4 * batches
    assert counters["frames"] == len(frames) == 8 * batches
