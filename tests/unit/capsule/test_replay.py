"""`replay` makes a capsule's call again, says what was not as it was, and leaves everything as it found it."""

import copy
import dataclasses
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from nanwatch import Capsule, replay, write_capsule
from nanwatch.instrumentation.execution_context import Autocast, RngState
from support.toys import Scale


class Heard(nn.Module):
    """Calls what it holds and keeps what came of it, for the test to see."""

    outputs: list[Any] = []  # noqa: RUF012 - shared by the copies that a replay makes

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self.inner(*args, **kwargs)
        self.outputs.append(output)
        return output


def overflowing() -> nn.Sequential:
    """float32 is enough for its result, float16 is not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Scale(1e4), Scale(1e4))


X = torch.full((2, 4), 3.0)


def output_of(folder: Path, model: Any, **options: Any) -> Tensor:
    """Return the output of the module in a replay without any warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        replay(folder, model, **options)
    return Heard.outputs[-1]


def test_weights_inputs_and_random_numbers_are_those_of_the_call(tmp_path):
    """Dropout draws the same again and the output has the same bits, whatever weights and state the model has now."""
    model = Heard(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))).train()
    rng = RngState.capture()
    want = model(X).detach()
    folder = write_capsule(tmp_path / "c", model, "", (X,), rng=rng)
    other = Heard(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))).eval()
    assert torch.equal(output_of(folder, other), want)
    assert not torch.equal(other.train()(X), want)


def test_autocast_is_that_of_the_call(tmp_path):
    """A call under autocast gives bfloat16 again, also when the replay stands in an autocast of another kind."""
    model = Heard(nn.Linear(4, 3))
    with torch.autocast("cpu", torch.bfloat16):
        want = model(X).detach()
        folder = write_capsule(tmp_path / "c", model, "", (X,))
    plain = write_capsule(tmp_path / "plain", model, "", (X,))
    with torch.autocast("cpu", torch.float16):
        got = output_of(folder, model)
        assert output_of(plain, model).dtype is torch.float32
    assert got.dtype is want.dtype is torch.bfloat16
    assert torch.equal(got, want)
    assert output_of(folder, model, dtype=torch.float32).dtype is torch.float32


def test_training_flags_are_those_of_the_call(tmp_path):
    """BatchNorm in training uses the batch's statistics, and writes neither the capsule's buffers nor the model's."""
    model = Heard(nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.9))).train()
    model.inner[1].eval()
    x = torch.randn(8, 4)
    want = copy.deepcopy(model)(x).detach()
    capsule = Capsule.open(write_capsule(tmp_path / "c", model, "", (x,)))
    model.eval()
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        replay(capsule, model)
        assert torch.equal(Heard.outputs[-1], want)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    assert not any(module.training for module in model.modules())
    assert not capsule.state["inner.0.running_mean"].any()


def test_nothing_of_the_callers_changes(tmp_path):
    """Random states of torch, Python and numpy, the model, the environment's watch and the capsule's inputs."""

    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            random.random()
            np.random.rand()
            return x.add_(torch.rand(2, 4))

    capsule = Capsule.open(write_capsule(tmp_path / "c", Noisy(), "", (X.clone(),)))
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    model = Noisy()
    replay(capsule, model)
    replay(capsule, lambda: nn.init.normal_(torch.empty(9)) is None or Noisy())
    assert torch.equal(before[0], torch.get_rng_state())
    assert before[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    assert torch.equal(capsule.args[0], X)
    assert model._compiled_call_impl is None


class Ratio(nn.Module):
    """Fails at a line of its own where a row sums to zero. Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x / x.sum(-1, keepdim=True)


def test_a_failure_has_its_operation_its_cure_and_its_name_in_the_model(tmp_path):
    model = nn.Module()
    model.parts = nn.ModuleList([Ratio()])
    folder = write_capsule(tmp_path / "ratio", model.parts[0], "parts.0", (torch.zeros(2, 3),))
    finding = replay(folder, model).finding
    line = Ratio.forward.__code__.co_firstlineno + 2
    assert (finding.module, finding.operation) == ("parts.0", "aten.div.Tensor")
    assert (finding.source, finding.cures[0].works) == (f"{__file__}:{line}", True)
    assert not model.parts[0].calls.any()
    made: list[nn.Module] = []
    replay(folder, lambda: made.append(Ratio()) or made[0])
    assert made[0].calls == 1


def test_a_dtype_casts_weights_and_inputs(tmp_path):
    """float32 cures what float16 overflows in, and the other way round; integers stay what they are."""
    folder = write_capsule(tmp_path / "c", overflowing(), "", (X,))
    assert replay(folder, overflowing).finding is None
    assert replay(folder, overflowing, dtype=torch.float64).finding is None
    report = replay(folder, overflowing, dtype=torch.float16)
    assert {record.dtype for frame in report.frames for record in frame.records} == {"float16"}
    model = Heard(nn.Embedding(5, 2))
    ids = write_capsule(tmp_path / "ids", model, "", (torch.tensor([1, 4]),))
    assert output_of(ids, model, dtype=torch.float64).dtype is torch.float64
    finding = dataclasses.replace(report.finding, batch=7)
    folder = write_capsule(tmp_path / "seventh", overflowing().half(), "", (X.half(),), finding=finding)
    report = replay(folder, overflowing)
    assert {report.finding.batch, *(frame.batch for frame in report.frames)} == {7}
    with pytest.raises(ValueError, match=r"floating point, such as torch\.float32, got torch\.int8"):
        replay(ids, model, dtype=torch.int8)


def test_the_model_may_come_in_several_ways(tmp_path):
    inner = overflowing().half()
    whole = nn.ModuleDict({"layer": inner})
    folder = write_capsule(tmp_path / "c", inner, "layer", (X.half(),))
    for model in (inner, lambda: whole, nn.ModuleDict({"module": whole})):
        finding = replay(str(folder), model).finding
        assert finding.module == "layer.2"


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Linear(4, 4), r"this model \(Linear\) has no such module and is none"),
        (nn.ModuleDict({"layers": nn.Identity()}), "close names: layers"),
        (nn.ModuleDict({"layer": nn.Identity()}), "'layer', a Sequential; .* has a Identity of that name"),
        (nn.Sequential(nn.Linear(4, 5)), r"'0.weight' has the shape \[4, 4\] in the capsule and \[5, 4\] in"),
        (nn.Sequential(nn.Linear(4, 4, bias=False)), "this Sequential has no weight or buffer 0.bias"),
        (3, "a torch.nn.Module or a callable that makes one, got one of int"),
    ],
)  # fmt: skip
def test_a_model_that_does_not_fit_is_named(tmp_path, model, expected):
    folder = write_capsule(tmp_path / "c", nn.Sequential(nn.Linear(4, 4)), "layer", (X,))
    with pytest.raises((TypeError, ValueError), match=expected):
        replay(folder, model)


def test_a_gpus_capsule_runs_where_there_is_none(tmp_path):
    """Recorded on a GPU that is not here: the CPU, its autocast the GPU's, and a remark."""
    model = Heard(nn.Linear(4, 3))
    autocast = Autocast("cpu", torch.float16, False), Autocast("cuda", torch.bfloat16, True)
    folder = write_capsule(tmp_path / "c", model, "", (X,), autocast=autocast)
    document = torch.load(folder / "call.pt", weights_only=True)
    torch.save(document | {"device": "cuda:7", "of_a_later_version": 1}, folder / "call.pt")
    with pytest.raises(RuntimeError, match=r"[Dd]evice"):
        replay(folder, model, device="")  # no device, and not the default one
    with pytest.warns(RuntimeWarning, match="the recorded call ran on cuda:7, this one on cpu"):
        replay(folder, model, device="cpu")
    assert Heard.outputs[-1].dtype is torch.bfloat16


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_a_gpu_random_numbers_come_again(tmp_path):
    """Dropout on a GPU draws the same, of its own generator; the capsule of it also runs on the CPU."""
    model = Heard(nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5))).train().cuda()
    rng = RngState.capture()
    with torch.autocast("cuda", torch.float16):
        want = model(X.cuda()).detach()
        folder = write_capsule(tmp_path / "c", model, "", (X.cuda(),), rng=rng)
    state = torch.cuda.get_rng_state()
    got = output_of(folder, model)
    assert torch.equal(got, want)
    assert got.dtype is torch.float16
    assert torch.equal(state, torch.cuda.get_rng_state())
    with pytest.warns(RuntimeWarning, match="this one on cpu"):
        replay(folder, model, device="cpu")
