"""A look at one value, where the looking could be seen, could lie or could do harm: modes, traces and captures."""

from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

import nanwatch
from nanwatch.recording.events import Settings
from nanwatch.recording.observe import completed_record, observe, parameter_mesh, take_sketch
from nanwatch.records.record import Note
from nanwatch.report.report import Report
from support.recorders import WITH_DEVICE, watched
from support.toys import Does, Scale
from support.watching import watch

INF = float("inf")


def mask_of(masked: float) -> torch.Tensor:
    """An additive attention mask of two rows."""
    return torch.tensor([[0.0, masked], [0.0, 0.0]])


def test_the_mask_of_a_dtensor_is_that_of_its_shard(one_process_mesh: Any) -> None:
    """The local shard of a distributed mask is read, without a collective operation of its own."""
    from torch.distributed.tensor import Replicate, distribute_tensor
    from torch.distributed.tensor.debug import CommDebugMode

    mask = distribute_tensor(mask_of(-INF), one_process_mesh, [Replicate()])
    with CommDebugMode() as communication:
        row = observe(mask, "input[0]", "input")
    assert row.note == Note("mask")
    assert communication.get_total_counts() == 0


def test_nothing_is_read_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA tensor seen in a capture is not checked and says why; one on the CPU is read as ever."""
    with FakeTensorMode():
        x = torch.empty(2, 3, device="cuda")  # stands for a real one, where there is no GPU
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for capturing, note in ((True, "not checked: in a CUDA graph capture"), (False, "FakeTensor")):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda answer=capturing: answer)
        row = observe(x, "input", "input")
        assert row[2:8] == ((2, 3), "float32", None, None, None, None)
        assert note in str(row.note)
        assert observe(torch.tensor([2.0]), "input", "input")[4:7] == (2.0, 2.0, True)
    note = observe(torch.ones(2, device="meta"), "", "input").note
    assert note == Note("not_checked", "meta tensor, no data")


def test_a_record_has_what_is_wanted_and_a_sketch_only_of_outputs_that_are_due() -> None:
    x, wanted = torch.tensor([2.0, 1e-40]), Settings(counts=True, sketches=2)
    due, between, given = (
        observe(x, "", role, batch=batch, wanted=wanted)
        for role, batch in (("output", 2), ("output", 3), ("input", 2))
    )
    assert [row.health and row.health.num_subnormal for row in (due, between, given)] == [1, 1, 1]
    assert [bool(take_sketch(row)) for row in (due, between, given, due)] == [True, False, False, False]
    assert observe(mask_of(torch.finfo(torch.float32).min), "", "input").health is None
    graph = torch.sparse_coo_tensor([[0, 0], [1, 1]], [2.0, 3.0], (2, 2), check_invariants=False)
    assert [observe(graph, "", role).abs_max for role in ("input", "gradient")] == [3.0, 5.0]


def test_an_infinite_number_that_a_device_has_read_is_no_mask() -> None:
    """Its row has the sign of a mask, and no dimension."""
    row = [INF, INF, 0.0, INF, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, -1.0]
    expected = observe(torch.tensor(-INF), "", "input")
    assert completed_record("", "input", (), "float32", row, False) == expected


class Asks(TorchFunctionMode):
    """Notes what it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.asked[f"{getattr(func, '__name__', '')} {getattr(func, '__self__', None)}"] += 1
        return func(*args, **(kwargs or {}))


class Counts(torch.Tensor):
    """Notes what a tensor of it is asked."""

    asked: ClassVar[Counter[str]] = Counter()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Counts.asked[f"{getattr(func, '__name__', '')} {getattr(func, '__self__', None)}"] += 1
        return super().__torch_function__(func, types, args, kwargs or {})


class Odd(nn.Module):
    """Owns, takes and gives tensors of a subclass, with buffers of several kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.weight = nn.Parameter(torch.ones(3).as_subclass(Counts))
        self.register_buffer("index", torch.arange(3))
        self.register_buffer("scale", torch.ones(3).as_subclass(Counts))

    def forward(self, x: torch.Tensor) -> Any:
        return {"norm": self.norm(x), "odd": x.as_subclass(Counts), "zeros": x * 0}


@pytest.mark.usefixtures("each_recorder")
@pytest.mark.parametrize("options", [{}, {"counts": True}, {"gradients": True}], ids=str)
def test_a_mode_and_a_subclass_see_no_call_of_the_recorder(options: dict[str, Any]) -> None:
    """A function mode and a subclass are asked by a watched training exactly what they are asked by a plain one."""
    asked = []
    for enabled in (False, True):
        torch.manual_seed(0)
        model = Odd()
        Counts.asked.clear()
        with watch(model, enabled=enabled, **options) as w, Asks() as mode:
            for _ in range(2):
                model(torch.randn(4, 3))["norm"].square().sum().backward()
        assert bool(w.frames) == enabled
        asked.append((mode.asked, Counts.asked.copy()))
    assert asked[0] == asked[1]


class Views(nn.Module):
    """Returns its argument in many shapes, dtypes and layouts, some of which share elements with others."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = x * self.weight.sum()
        z, before = torch.complex(x, x + 1), x.clone()
        causal = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).tril() == 0, torch.finfo(x.dtype).min)
        return [
            *(x, x.reshape(-1), x.reshape(2, -1), x.T, x.T.contiguous(), x.flatten()[1:], x),
            *(z, z.conj(), z.imag, z.conj().imag, z.real),
            *(x.to(torch.bfloat16), x.to(torch.float64), x.long(), x > 0, x.view(torch.int32)),
            *(x[:0], x[0, 0], x.expand(3, *x.shape), x.to(torch.float8_e5m2)),
            *(x / 0, x.log() * torch.inf, causal, torch.full((3,), torch.nan)),
            *(before, x.add_(1)),
        ]


def fingerprints_of(model: nn.Module) -> list[list[int | None]]:
    """Fill a list with the fingerprints of each call's weights, inputs and outputs, by plain hooks."""
    calls: list[list[int | None]] = []

    def hook(module: nn.Module, args: Any, output: Any) -> None:
        values = [*module.parameters(recurse=False), *args]
        values += output if isinstance(output, list) else [output]
        calls.append([nanwatch.fingerprint(x.detach()) for x in values])

    for module in model.modules():
        module.register_forward_hook(hook)
    return calls


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_each_record_has_the_fingerprint_of_its_tensor(recorder: str) -> None:
    """Also of an input that was read as an output, of another view of it, and of weights in a second batch."""
    torch.manual_seed(0)
    model = Does(lambda views, then, x: [then(view) for view in views(x)], Views(), nn.Identity())
    calls = fingerprints_of(model)
    with watched(model, recorder, fingerprints=True, max_frames=100, on_nonfinite="record") as w:
        for _ in range(2):
            model(torch.randn(3, 4))
        frames = w.frames
    assert [[record.fingerprint for record in frame.records] for frame in frames] == calls
    assert w.counters.get("stale_hits", 0) == 0


NOTE = "local shard: Shard(dim=0) at mesh[0]=0 of 1"


@pytest.fixture(name="x")
def sharded(one_process_mesh: Any) -> Any:
    """A DTensor of two dimensions with an inf at [1, 2]."""
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.ones(2, 3)
    whole[1, 2] = float("inf")
    return distribute_tensor(whole, one_process_mesh, [Shard(0)])


def test_report_in_all_forms_says_which_shard(x: Any) -> None:
    """Text, JSON and its way back, and the page; the finding has the place in the shard."""
    model = Scale()
    with watch(model, on_nonfinite="record") as w:
        model(x)
    report = w.report()
    record = report.frames[0].records[0]
    assert (str(record.note), record.shape) == (NOTE, (2, 3))
    for part in (f"input[0] ({NOTE})", "the first at [1, 2]; ", f"the {NOTE} of float32 of shape [2, 3]"):
        assert part in report.to_text()
    assert Report.from_json(report.to_json()) == report


def test_parameters_say_where_this_process_is_in_their_meshes(x: Any) -> None:
    """Each dimension once, also while FSDP has others in their place; nothing without a model or a mesh."""
    model = nn.Sequential(nn.Linear(3, 2), Scale(), nn.Linear(3, 2))
    assert parameter_mesh(model) == ()
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(x)
    assert parameter_mesh(model) == ("mesh[0]=0 of 1",)
    with watch(model) as w:
        inner = torch.distributed.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        model[0].weight = nn.Parameter(torch.ones(2, 2))
        model[2].weight = nn.Parameter(type(x).from_local(torch.ones(2), inner))
        model[1](torch.ones(1))
        assert "This rank in the device mesh: mesh[0]=0 of 1, tp=0 of 1." in w.report().to_text()
    assert parameter_mesh(None) == ()
