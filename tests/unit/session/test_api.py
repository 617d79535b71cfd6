"""watch: what it sees, when it raises, and that the model does not notice."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from nanwatch.records.note import Note
from nanwatch.records.record import Frame, Record
from nanwatch.report.report import NonFiniteError, Report
from nanwatch.session.api import watch
from nanwatch.session.options import Audit
from support.architectures import built, inputs_of
from support.toys import Scale

INF = float("inf")


class Call(nn.Module):
    """Calls its part with whatever it is given, and returns what `answer` makes of the result."""

    def __init__(self, part: nn.Module, answer: Any = lambda x: x) -> None:
        super().__init__()
        self.part = part
        self.answer = answer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer(self.part(*args, **kwargs))


class Keep(nn.Module):
    """Takes anything, returns the first positional argument or the first keyword argument."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else next(iter(kwargs.values()), None)


def labels(frame: Frame) -> list[str]:
    """The labels of a frame's records."""
    return [record.label for record in frame.records]


def only(frames: tuple[Frame, ...], name: str) -> Frame:
    """The one frame of that module."""
    (frame,) = [frame for frame in frames if frame.name == name]
    return frame


def by_label(frame: Frame) -> dict[str, Record]:
    """A frame's records by their labels."""
    return {record.label: record for record in frame.records}


# Calls that a watch sees


def test_frames_are_the_calls_in_their_order() -> None:
    """One frame a call: children before parents, weights, buffers, inputs, outputs; equal to torch's own numbers."""
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval()
    x = torch.randn(4, 3)
    with watch(model) as w:
        y = model(x)
    assert [(f.name, f.class_name, f.batch) for f in w.frames] == [
        ("0", "Linear", 0),
        ("1", "BatchNorm1d", 0),
        ("", "Sequential", 0),
    ]
    assert labels(w.frames[1]) == ["weight", "bias", "running_mean", "running_var", "input[0]", "output"]
    assert [r.role for r in w.frames[1].records] == [
        "weight",
        "weight",
        "buffer",
        "buffer",
        "input",
        "output",
    ]
    expected = {"weight": model[0].weight, "bias": model[0].bias, "input[0]": x, "output": model[0](x)}
    for record in w.frames[0].records:
        tensor = expected[record.label].detach()
        assert (record.abs_min, record.abs_max) == (tensor.abs().min().item(), tensor.abs().max().item())
        assert (record.shape, record.dtype, record.isfinite) == (tuple(tensor.shape), "float32", True)
        assert type(record.shape) is tuple
    assert by_label(w.frames[2])["output"].abs_max == y.abs().max().item()


@dataclass
class Answer:
    """An output that is no tuple."""

    logits: Tensor
    hidden: list[dict[str, Tensor]]


@pytest.mark.parametrize(
    ("args", "kwargs", "label"),
    [
        ((1,), {"attention": torch.tensor(INF)}, "input[attention]"),
        (({"x": [torch.tensor(INF)]},), {}, "input[0][x][0]"),
        (([torch.tensor(0.0), torch.tensor(INF)],), {}, "input[0][1]"),
        ((Answer(torch.tensor(1.0), [{"h": torch.tensor(INF)}]),), {}, "input[0][hidden][0][h]"),
    ],
)
def test_inputs_are_seen_wherever_they_are(args: tuple[Any, ...], kwargs: dict[str, Any], label: str) -> None:
    """Keyword arguments, dicts, lists and dataclasses at any depth are looked into."""
    model = Call(Keep(), lambda _: None)
    with watch(model), pytest.raises(NonFiniteError) as error:
        model(*args, **kwargs)
    finding = error.value.report.finding
    assert finding is not None
    assert (finding.module, finding.label, finding.origin) == ("", label, "data")


def test_buffers_of_floating_point_are_seen() -> None:
    """A bad running statistic is found as a buffer; integer buffers are left out."""
    model = nn.Sequential(nn.BatchNorm1d(2)).eval()
    model[0].running_var[1] = float("nan")
    with watch(model), pytest.raises(NonFiniteError) as error:
        model(torch.ones(2, 2))
    report = error.value.report
    assert report.finding is not None
    assert (report.finding.label, report.finding.origin, report.finding.index) == (
        "running_var",
        "buffer",
        (1,),
    )
    assert "num_batches_tracked" not in labels(report.frames[-1])


def test_what_is_no_tensor_is_noted() -> None:
    """None, numbers and caches are noted, integers have a range, and what has no data is not called finite."""
    model = Call(Keep(), lambda _: torch.empty(2, device="meta"))
    with watch(model) as w:
        model(None, 3, torch.tensor([5, -7]), torch.empty(2, device="meta"))
    records = by_label(only(w.frames, "part"))
    assert (records["input[0]"].note, records["input[1]"].note) == (Note("absent"), Note("not_a_tensor"))
    assert (records["input[2]"].abs_min, records["input[2]"].abs_max, records["input[2]"].dtype) == (
        5,
        7,
        "int64",
    )
    for record in (records["input[3]"], w.frames[-1].records[-1]):
        assert (record.isfinite, record.abs_min, record.shape) == (None, None, (2,))
        assert str(record.note).startswith("not checked: meta")


# When something is not finite


def test_raise_names_the_culprit() -> None:
    """The error comes from the non-finite call, with the frames up to it, the element, and the cause."""
    model = nn.Sequential(Scale(1e20), Scale(1e20), Scale(1.0))
    x = torch.tensor([[1.0, 0.5], [1e-9, 1.0]])
    with watch(model) as w, pytest.raises(NonFiniteError) as error:
        model(x)
    report = error.value.report
    assert [frame.name for frame in report.frames] == ["0", "1"]
    finding = report.finding
    assert finding is not None
    assert (finding.module, finding.class_name, finding.label) == ("1", "Scale", "output")
    assert (finding.batch, finding.value, finding.origin) == (0, "inf", "produced")
    assert (finding.num_nonfinite, finding.numel, finding.index) == (3, 4, (0, 0))
    assert w.report() is report
    assert isinstance(error.value, ValueError)


def test_code_between_modules_is_named_by_its_caller() -> None:
    """A value that functional code of a parent makes is received, from that parent."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Scale(1e20), Scale()

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) * 1e20)

    model = nn.Sequential(Block())
    with watch(model), pytest.raises(NonFiniteError) as error:
        model(torch.ones(2))
    finding = error.value.report.finding
    assert finding is not None
    assert (finding.module, finding.label, finding.origin) == ("0.b", "input[0]", "received")
    assert finding.source_module == "0"


def test_bad_weights_and_bad_data_are_told_apart() -> None:
    """A nan weight is found as a weight, a nan in the batch as data."""
    model = nn.Sequential(nn.Linear(2, 2))
    origins = []
    for poison in (torch.full((1, 2), float("nan")), None):
        if poison is None:
            model[0].bias.data[1] = float("nan")
        with watch(model), pytest.raises(NonFiniteError) as error:
            model(torch.ones(1, 2) if poison is None else poison)
        assert error.value.report.finding is not None
        origins.append(error.value.report.finding.origin)
    assert origins == ["data", "weight"]


def test_record_keeps_the_start_of_the_failure() -> None:
    """Clean batches, two bad ones on end, a clean one: the report is that of the first bad one, frames and all."""
    model = nn.Sequential(Scale(1.0), Scale(1.0))
    with watch(model, on_nonfinite="record", max_frames=3) as w:
        for factor in (1.0, INF, INF, 1.0):
            model[1].factor = factor
            model(torch.ones(1))
        first = w.report()
        assert first.finding is not None
        assert (first.batch, first.finding.batch, first.finding.module) == (1, 1, "1")
        assert [(f.batch, f.name) for f in first.frames] == [(0, ""), (1, "0"), (1, "1")]
        assert (w.batch, [f.batch for f in w.frames]) == (3, [3, 3, 3])
        model[1].factor = INF
        model(torch.ones(1))
    assert w.report().batch == 4


def test_batches_nobody_looked_at_end_no_failure() -> None:
    """With every=2, bad batches 0 and 2 are one failure: of batch 1 nothing is known."""
    model = nn.Sequential(Scale(INF))
    with watch(model, every=2, on_nonfinite="record") as w:
        for _ in range(3):
            model(torch.ones(1))
    assert w.report().batch == 0


def test_a_callable_gets_each_bad_batch() -> None:
    """The callable is given one report for every bad batch, and what it raises is raised."""
    model = nn.Sequential(Scale(INF), Scale())
    reports: list[Report] = []
    with watch(model, on_nonfinite=reports.append):
        for factor in (INF, 1.0, INF, INF):
            model[0].factor = factor
            model(torch.ones(1))
    assert [report.batch for report in reports] == [0, 2, 3]

    def refuse(report: Report) -> None:
        raise LookupError(report.batch)

    with watch(model, on_nonfinite=refuse), pytest.raises(LookupError, match="0"):
        model(torch.ones(1))


# Batches


def test_a_batch_is_an_outermost_call() -> None:
    """The root, or a submodule called from outside, is a batch; calls inside of it are not."""
    model = nn.Sequential(Scale(), nn.Sequential(Scale()))
    with watch(model) as w:
        assert w.batch is None
        model(torch.ones(1))
        model[1](torch.ones(1))
        model(torch.ones(1))
    assert [frame.batch for frame in w.frames] == [0, 0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert w.batch == 2


class Fails(nn.Module):
    """Calls its part, then raises, as often as it is told."""

    def __init__(self, part: nn.Module, error: BaseException) -> None:
        super().__init__()
        self.part = part
        self.error: BaseException | None = error

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(x)
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("error", [RuntimeError("boom"), KeyboardInterrupt()])
def test_an_exception_ends_the_batch(error: BaseException) -> None:
    """After a forward that raised, frames are kept and the next call is the next batch, Ctrl-C included."""
    inner = Fails(Scale(), error)
    model = nn.Sequential(nn.Sequential(inner), Scale())
    with watch(model) as w:
        with pytest.raises(type(error)):
            model(torch.ones(1))
        assert [frame.name for frame in w.frames] == ["0.0.part"]
        inner.error = None
        model(torch.ones(1))
    assert [(f.batch, f.name) for f in w.frames[1:]] == [
        (1, "0.0.part"),
        (1, "0.0"),
        (1, "0"),
        (1, "1"),
        (1, ""),
    ]


def test_what_a_pre_hook_calls_belongs_to_the_batch() -> None:
    """A module called by a pre-hook of the root, registered before the watch, is no batch of its own."""
    model = nn.Sequential(Scale())
    model.register_forward_pre_hook(lambda module, args: (module[0](*args),))
    with watch(model) as w:
        model(torch.ones(1))
    assert [(frame.batch, frame.name) for frame in w.frames] == [(0, "0"), (0, "0"), (0, "")]


def test_a_caught_error_inside_a_forward_goes_on() -> None:
    """A forward that catches its child's exception, and calls another child while handling it, stays one batch."""

    class Careful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bad, self.good = Fails(Scale(), RuntimeError("boom")), Scale()

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.bad(x)
            except RuntimeError:
                return self.good(x)

    model = Careful()
    with watch(model) as w:
        model(torch.ones(1))
        try:
            raise LookupError
        except LookupError:
            model(torch.ones(1))
    names = ["bad.part", "good", ""]
    assert [(frame.batch, frame.name) for frame in w.frames] == [(b, name) for b in (0, 1) for name in names]


def test_threads_have_batches_of_their_own() -> None:
    """Calls in several threads at once are each one batch with all of their frames."""
    model = nn.Sequential(*[Scale() for _ in range(5)])
    with watch(model, max_frames=10_000) as w:
        threads = [
            threading.Thread(target=lambda: [model(torch.ones(1)) for _ in range(20)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    counts = [sum(frame.batch == batch for frame in w.frames) for batch in range(80)]
    assert counts == [6] * 80


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_recomputes_in_the_same_batch(reentrant: bool) -> None:
    """A forward that runs again in the backward is marked and is no batch of its own."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = checkpoint(self.inner, x, use_reentrant=reentrant)
            return result

    model = Checkpointed()
    with watch(model) as w:
        for _ in range(2):
            model(torch.ones(1, 2, requires_grad=True)).sum().backward()
    assert w.batch == 1
    assert {frame.batch for frame in w.frames} == {0, 1}
    again = [frame for frame in w.frames if frame.recomputed]
    assert {frame.batch for frame in again} == {0, 1}
    assert {frame.name for frame in again} >= {"inner.0"}
    assert len([f for f in w.frames if f.name == "inner.0" and not f.recomputed]) == 2


# Options


def test_roles_can_be_left_out() -> None:
    """Each word of `read` has its records."""
    model = nn.BatchNorm1d(1)
    for role in ("weight", "buffer", "input", "output"):
        read = " ".join({"weights", "buffers", "inputs", "outputs"} - {f"{role}s"})
        with watch(model, read=read) as w:
            model(torch.randn(3, 1))
        assert {r.role for r in w.frames[0].records} == {"weight", "buffer", "input", "output"} - {role}


def test_every_looks_at_some_batches() -> None:
    """every=3 sees batches 0 and 3 and counts them all."""
    model = nn.Sequential(Scale())
    with watch(model, every=3) as w:
        for _ in range(5):
            model(torch.ones(1))
    assert [frame.batch for frame in w.frames] == [0, 0, 3, 3]
    assert w.batch == 4


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"modules": "0*"}, ["0.0", "0.1", "0"]),
        ({"modules": ["0.?", "1"]}, ["0.0", "0.1", "1"]),
        ({"ignore_modules": "0.*"}, ["0", "1", ""]),
        ({"modules": "0*", "ignore_modules": ("*.1",)}, ["0.0", "0"]),
        ({"modules": ""}, [""]),
    ],
)
def test_patterns_choose_modules(options: dict[str, Any], names: list[str]) -> None:
    """Glob patterns on the names choose the frames; a batch is still a call of the root."""
    model = nn.Sequential(nn.Sequential(Scale(), Scale()), Scale())
    with watch(model, **options) as w:
        model(torch.ones(1))
        model(torch.ones(1))
    assert [(f.batch, f.name) for f in w.frames] == [(batch, name) for batch in (0, 1) for name in names]


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        ("model", {}, TypeError, r"needs a torch.nn.Module, got str"),
        (nn.ReLU, {}, TypeError, r"got the class ReLU; pass ReLU\(...\)"),
        (torch.jit.script(nn.ReLU()), {}, TypeError, r"before torch.jit"),
        (
            nn.ReLU(),
            {"max_frame": 3},
            TypeError,
            r"watch has no option 'max_frame'; close names: max_frames",
        ),
        (nn.ReLU(), {"max_frames": 0}, ValueError, r"max_frames should be at least 1, got 0"),
        (nn.ReLU(), {"max_frames": -2}, ValueError, r"got -2"),
        (nn.ReLU(), {"max_frames": 2.0}, TypeError, r"max_frames should be a whole number .* got 2.0"),
        (nn.ReLU(), {"max_frames": True}, TypeError, r"got True"),
        (nn.ReLU(), {"every": 0}, ValueError, r"every should be at least 1"),
        (nn.ReLU(), {"on_nonfinite": "explode"}, ValueError, r'"raise", "warn", "record" .* got \'explode\''),
        (nn.ReLU(), {"gradients": 1}, TypeError, r"gradients should be True or False, got 1"),
        (nn.ReLU(), {"read": "weight"}, ValueError, r"read should be one or more words of .* got 'weight'"),
        (nn.ReLU(), {"read": ""}, ValueError, r"read should be one or more words"),
        (nn.ReLU(), {"read": "weights", "gradients": True}, ValueError, r"gradients needs the outputs"),
        (nn.ReLU(), {"audit": -1}, ValueError, r"audit should be at least 0, got -1"),
        (nn.ReLU(), {"trace": 3}, TypeError, r"trace should be a path or a nanwatch.Trace, got 3"),
        (nn.ReLU(), {"max_frames": 10**9}, ValueError, r"max_frames should be at most 1000000"),
        (nn.ReLU(), {"every": 10**9999}, ValueError, r"every should be at most .* bits"),
        (nn.ReLU(), {"modules": 3}, TypeError, r"modules .* got 3"),
        (nn.Sequential(nn.ReLU()), {"modules": "encoder"}, ValueError, r"'encoder' matches no module"),
        (
            nn.Sequential(nn.ReLU()),
            {"ignore_modules": "encoder"},
            ValueError,
            r"ignore_modules .* matches no module",
        ),
        (
            nn.Linear(1, 1),
            {"audit": Audit(frozen="wieght")},
            ValueError,
            r"frozen pattern 'wieght' matches no module and no weight; close names: weight$",
        ),
        (nn.ReLU(), {"ignore_modules": "*"}, ValueError, r"leave no module to watch"),
    ],
)
def test_bad_arguments_are_named(model: Any, options: Any, error: type[Exception], message: str) -> None:
    """A wrong argument is refused before any hook is on, with its value and what is accepted."""
    with pytest.raises(error, match=message):
        watch(model, **options)
    if isinstance(model, nn.Module) and not isinstance(model, torch.jit.ScriptModule):
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# The model does not notice


def test_hooks_of_others_stay() -> None:
    """Hooks put on before and during the watch are still there, in their order, after stop()."""
    model = nn.Sequential(Scale())
    calls: list[str] = []
    model[0].register_forward_hook(lambda *_: calls.append("before"))
    w = watch(model)
    model[0].register_forward_hook(lambda *_: calls.append("during"))
    w.stop()
    w.stop()
    model(torch.ones(1))
    assert calls == ["before", "during"]
    assert len(model[0]._forward_hooks) == 2
    assert w.frames == ()


def test_stop_leaves_nothing() -> None:
    """A watch registers no hook on a module; after stop() every module's __dict__ is what it was."""
    model = built("gpt2").eval()
    model(**inputs_of("gpt2", 0))  # transformers registers hooks of its own in the first call
    before = [dict(module.__dict__) for module in model.modules()]
    kinds = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    hooks = [[len(getattr(m, kind)) for kind in kinds] for m in model.modules()]
    with watch(model):
        model(**inputs_of("gpt2", 0))
        assert [[len(getattr(m, kind)) for kind in kinds] for m in model.modules()] == hooks
    after = [dict(module.__dict__) for module in model.modules()]
    assert all(old.keys() == new.keys() for old, new in zip(before, after, strict=True))
    assert all(old[key] is new[key] for old, new in zip(before, after, strict=True) for key in old)


def test_no_tensor_is_kept_alive() -> None:
    """Once the caller drops inputs and outputs, they are gone, also after an error was handled."""
    model = nn.Sequential(Scale(1.0), Scale(1.0))
    with watch(model) as w:
        for factor in (1.0, INF):
            model[1].factor = factor
            x = torch.ones(3)
            ref = weakref.ref(x)
            try:
                output = model(x)
                del output
            except NonFiniteError as error:
                error.__traceback__ = None
            del x
            gc.collect()
            assert ref() is None
        assert len(w.frames) == 5


def test_no_tensor_is_kept_alive_by_an_interrupted_batch() -> None:
    """Ctrl-C in a forward leaves no reference to what the batch was called with."""
    model = nn.Sequential(Fails(Scale(), KeyboardInterrupt()))
    with watch(model):
        x = torch.ones(3)
        ref = weakref.ref(x)
        try:
            model(x)
        except KeyboardInterrupt as error:
            error.__traceback__ = None
        del x
        gc.collect()
        assert ref() is None


def test_no_graph_is_built() -> None:
    """Watching saves nothing for the backward: the graph has the same nodes and hooks never see requires_grad."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    saved: list[int] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(1)
        return x

    counts = []
    for watched in (False, True):
        w = watch(model) if watched else None
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            model(torch.ones(1, 2))
        counts.append(len(saved))
        if w is not None:
            w.stop()
    assert counts[0] == counts[1] > 0


def test_a_shared_module_is_watched_once() -> None:
    """A module under two parents gives one frame a call, under its first name."""
    shared = Scale()
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    with watch(model) as w:
        model(torch.ones(1))
    assert [frame.name for frame in w.frames] == ["0.0", "0", "0.0", "1", ""]


def test_two_watches_do_not_disturb_each_other() -> None:
    """Watches on a model and on a part of it each count their own batches."""
    model = nn.Sequential(Scale(), nn.Sequential(Scale()))
    with watch(model) as whole, watch(model[1]) as part:
        model(torch.ones(1))
        model[1](torch.ones(1))
    assert [(f.batch, f.name) for f in whole.frames] == [
        (0, "0"),
        (0, "1.0"),
        (0, "1"),
        (0, ""),
        (1, "1.0"),
        (1, "1"),
    ]
    assert [(f.batch, f.name) for f in part.frames] == [(0, "0"), (0, ""), (1, "0"), (1, "")]


def test_functorch_transforms_are_left_alone() -> None:
    """Inside vmap and grad the values cannot be read: the frames say so and the result is the same."""
    model = nn.Sequential(Scale(2.0))
    x = torch.ones(3, 2)
    with watch(model) as w:
        assert torch.equal(torch.func.vmap(model)(x), 2 * x)
        torch.func.grad(lambda x: model(x).sum())(x)
    notes = {record.note for frame in w.frames for record in frame.records}
    assert all(str(note).startswith("not checked: ") for note in notes)


# Once more


def test_a_watch_of_the_same_model_with_the_same_options_takes_the_place_of_the_first() -> None:
    """As in a notebook's cell that runs again; other options are another watch, which sees its own batches."""
    model = nn.Sequential(nn.Linear(2, 2))
    first, other, second = watch(model), watch(model, every=2), watch(model)
    model(torch.ones(1, 2))
    assert [one.batch for one in (first, other, second)] == [None, 0, 0]
    third = watch(model)
    model(torch.ones(1, 2))
    assert [one.batch for one in (second, third)] == [0, 0]


def test_a_class_that_hides_the_calls_of_its_modules_is_named() -> None:
    """Its own attribute stands before that of nn.Module."""

    class Shadow(nn.Module):
        _compiled_call_impl = None

    with pytest.warns(RuntimeWarning, match="calls of Shadow are not recorded"):
        watch(nn.Sequential(Shadow()))
