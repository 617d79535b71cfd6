"""A capsule holds a call bit for bit, says what it leaves out, and appears whole or not at all.

Opening one from a stranger runs no code, and fails by CapsuleError alone.
"""

import math
import os
import pickle
import re
import tempfile
import weakref
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch import Capsule, write_capsule
from nanwatch.capsule.capsule import CapsuleError
from nanwatch.instrumentation.execution_context import Autocast, RngState
from support.oracle import DTYPES, random_patterns
from support.toys import Scale, fault_of, mlp

COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
Pair = namedtuple("Pair", ["first", "second"])


def bits(x: Tensor) -> bytes:
    """The bytes of the elements in C order."""
    plain = x.detach().resolve_conj().resolve_neg().contiguous()
    return plain.as_strided((x.numel(),), (1,)).view(torch.uint8).numpy().tobytes()


def spelt(value: Any) -> Any:
    """The value as what is equal where all types and bits are."""
    if isinstance(value, Tensor):
        return value.dtype, value.shape, value.requires_grad, bits(value)
    if isinstance(value, dict):
        return [(key, spelt(x)) for key, x in value.items()]
    if type(value) in (list, tuple):
        return type(value), [spelt(x) for x in value]
    return type(value), value.hex() if isinstance(value, float) else value


def round_trip(*args: Any, **kwargs: Any) -> Capsule:
    """The capsule of a call of a module without weights."""
    with tempfile.TemporaryDirectory() as folder:
        return Capsule.open(write_capsule(f"{folder}/c", nn.Identity(), "block.0", args, kwargs))


def test_arguments_come_back_bit_for_bit():
    x = torch.randn(3, 4)
    plain = [None, True, -(1 << 70), math.nan, -0.0, "é", torch.float8_e5m2, torch.device("cuda:3")]
    tensors = [x.t(), x[1:, ::2], x[:1].expand(5, 4), torch.view_as_complex(x.view(3, 2, 2)).conj()]
    learned = x.clone().requires_grad_()
    args = [plain, torch.Size([2, 0]), (tensors, learned), {("a", 1): [plain], None: {"b": x}}]
    capsule = round_trip(*args, x, x.view(12), mask=tensors, key=x)
    assert spelt(list(capsule.args)) == spelt([*args, x, x.view(12)])
    assert capsule.args[-2] is capsule.kwargs["key"]  # attention asks whether query `is` key
    assert spelt(capsule.kwargs) == spelt({"mask": tensors, "key": x})
    assert capsule.left_out == ()


@pytest.mark.parametrize("dtype", [*DTYPES, *COMPLEX], ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 5)])
def test_every_dtype_comes_back_bit_for_bit(dtype, shape):
    """All formats, those too that safetensors has no name for, as inputs and as buffers."""
    x = random_patterns(dtype, shape, seed=3)
    module = nn.Module()
    module.register_buffer("held", x, persistent=False)
    with tempfile.TemporaryDirectory() as folder:
        capsule = Capsule.open(write_capsule(f"{folder}/c", module, "", (x.clone(),)))
    assert spelt(capsule.args[0]) == spelt(capsule.state["held"]) == spelt(x)


def test_the_file_is_read_without_nanwatch(tmp_path):
    """It holds plain containers and tensors alone, which `torch.load` reads with weights_only."""
    args = torch.ones(1, 2), [None, {1}], Pair(1, 2), torch.eye(2).to_sparse()
    folder = write_capsule(tmp_path / "c", nn.Linear(2, 3), "head", args)
    document = torch.load(folder / "call.pt", weights_only=True)
    assert torch.equal(document["args"][0], torch.ones(1, 2))
    assert "input[1][1] (set)" in document["args"][1][1]["why"]
    assert f"input[2] ({__name__}.Pair)" in document["args"][2]["why"]
    assert "its values do not lie in one block" in document["args"][3]["why"]
    assert (document["state"].keys(), os.listdir(folder)) == ({"weight", "bias"}, ["call.pt"])


def test_weights_and_buffers_are_kept_and_tied_ones_once(tmp_path):
    """The whole sub-tree, buffers that are not persistent too; two names of one weight are one tensor in the file."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[1].weight = model[0].weight
    model.register_buffer("mask", torch.tensor([True, False]), persistent=False)
    folder = write_capsule(tmp_path / "c", model, "", ())
    capsule = Capsule.open(folder)
    want = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    assert spelt(dict(sorted(capsule.state.items()))) == spelt(dict(sorted(want.items())))
    assert capsule.state["0.weight"] is capsule.state["1.weight"]


def test_the_situation_is_kept(tmp_path):
    """Name, class, rank, versions, autocast, random states and the finding as it was handed in."""
    model = Scale(math.inf)
    nanwatch.watch(model)
    finding = fault_of(model, torch.ones(2)).finding
    rng = RngState.capture()
    torch.rand(3)
    autocast = (Autocast("cpu", torch.bfloat16, True), Autocast("cuda", torch.float16, False))
    facts = {"finding": finding, "rank": 3, "rng": rng, "autocast": autocast}
    folder = write_capsule(tmp_path / "c", mlp(), "a.b", (), **facts)
    capsule = Capsule.open(folder)
    kept = capsule.module, capsule.class_name, capsule.device, capsule.rank, capsule.finding
    assert kept == ("a.b", "Sequential", "cpu", 3, finding)
    assert capsule.autocast == autocast
    assert Capsule.open(folder / "call.pt").folder == capsule.folder == folder
    assert finding is not None
    assert torch.equal(capsule.rng.torch, rng.torch)
    assert not torch.equal(capsule.rng.torch, torch.get_rng_state())
    versions = {"torch": torch.__version__, "nanwatch": nanwatch.__version__}
    assert versions.items() <= capsule.versions.items()


def test_the_largest_weights_are_left_out_first_and_inputs_last(tmp_path):
    """Beyond max_bytes the largest weight goes first, the inputs go last, and each is named with its bytes."""
    model = nn.Sequential(nn.Linear(100, 10), nn.Linear(10, 20))  # 4000, 40, 800 and 80 bytes
    x = torch.ones(2, 100)  # 800 bytes

    def left_out(max_bytes: int) -> set[tuple[str, str]]:
        capsule = Capsule.open(write_capsule(tmp_path / "c", model, "", (x,), max_bytes=max_bytes))
        missing = {f"state[{name}]" for name, x in capsule.state.items() if isinstance(x, dict)}
        sizes = {(text.split()[0], re.search(r"([\d,]+) bytes\)", text)[1]) for text in capsule.left_out}
        assert missing == {name for name, _ in sizes if name.startswith("state")}
        return sizes

    first, second = ("state[0.weight]", "4,000"), ("state[1.weight]", "800")
    assert left_out(5720) == set()
    assert (left_out(5719), left_out(1719)) == ({first}, {first, second})
    biases = {("state[1.bias]", "80"), ("state[0.bias]", "40")}
    assert left_out(0) == {first, second, *biases, ("input[0]", "800")}


def test_a_folder_is_whole_and_never_takes_the_place_of_another(tmp_path, monkeypatch):
    """A number is appended, whatever is there. The error of a write is the caller's, and it leaves nothing."""
    (tmp_path / "c").mkdir()
    (tmp_path / "c.2").write_text("mine")
    (tmp_path / "c.3").symlink_to(tmp_path / "nowhere")
    assert write_capsule(tmp_path / "c", nn.Identity(), "", ()) == tmp_path / "c.4"
    assert (os.listdir(tmp_path / "c"), (tmp_path / "c.2").read_text()) == ([], "mine")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space left"):
        write_capsule(tmp_path / "other" / "c", nn.Identity(), "", (torch.ones(2),))
    assert os.listdir(tmp_path / "other") == []


def test_a_forked_child_leaves_its_parents_unfinished_capsule(tmp_path, monkeypatch):
    before = torch.save

    def save(*args: object) -> None:
        if (pid := os.fork()) == 0:
            weakref.finalize._exitfunc()  # as the exit of a process does
            os._exit(0)
        os.waitpid(pid, 0)
        before(*args)

    monkeypatch.setattr(torch, "save", save)
    assert Capsule.open(write_capsule(tmp_path / "c", nn.Identity(), "", ())).args == ()


def test_writing_changes_nothing_of_the_call(tmp_path):
    model, x = mlp(), torch.randn(4, 3, requires_grad=True)
    model(x).sum().backward()

    def state() -> list[object]:
        tensors = [(bits(p), bits(p.grad), p._version) for p in (*model.parameters(), x)]
        return [*tensors, torch.get_rng_state().tolist()]

    before = state()
    write_capsule(tmp_path / "c", model, "", (x,))
    assert state() == before


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_capsule(tmp_path / "c", mlp(), "", (torch.randn(2, 3), [{"a": 1}])) / "call.pt"


def error_of(file: Path) -> str:
    with pytest.raises(CapsuleError) as caught:
        Capsule.open(file.parent)
    assert str(file) in str(caught.value)
    return str(caught.value)


class Attack:
    def __reduce__(self):
        return os.mkdir, ("attacked",)


def test_no_code_of_the_file_runs(file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(torch.load(file, weights_only=True) | {"module": Attack()}, file)
    assert "it holds more than plain values" in error_of(file)
    file.write_bytes(pickle.dumps(Attack()))
    assert "torch.save has not written it" in error_of(file)
    assert os.listdir(tmp_path) == ["c"]


def test_the_error_names_file_and_place(file):
    whole, document = file.read_bytes(), torch.load(file, weights_only=True)
    for keep in (0, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:keep])
        error_of(file)
    for name, value, words in (
        ("rng", None, "TypeError"),
        ("version", 7, "is 7"),
        ("finding", "{}", "report"),
    ):
        torch.save(document | {name: value}, file)
        assert words in error_of(file)
