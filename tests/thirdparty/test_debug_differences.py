"""Where the drop-in departs from transformers on purpose; each test has a row in docs/compatibility.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import debug_utils as oracle

from nanwatch.integrations.debug import DebugUnderflowOverflow


class Feed(nn.Module):
    """A root whose submodules see whatever the call was given, one after the other."""

    def __init__(self, *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules or [nn.Identity()])

    def forward(self, *values: Any) -> int:
        for part in self.parts:
            for value in values:
                part(value)
        return len(values)


class Grow(nn.Module):
    """Returns x * factor."""

    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


def frame(text: str) -> list[str]:
    """The record lines of the first frame, without those of the header."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if "Identity" in line)
    return lines[start + 1 : start + 3]


@pytest.mark.parametrize(
    ("value", "numbers"),
    [
        (torch.tensor([True, False]), "0.00e+00 1.00e+00"),
        (torch.tensor([3, 65535], dtype=torch.uint16), "3.00e+00 6.55e+04"),
        (torch.tensor([2.0, -448.0]).to(torch.float8_e4m3fn), "2.00e+00 4.48e+02"),
        (torch.empty(0), "     inf 0.00e+00"),
        (torch.eye(2).to_sparse(), "0.00e+00 1.00e+00"),
        (torch.empty(3, device="meta"), "      not checked"),
    ],
    ids=["bool", "unsigned", "fp8", "empty", "sparse", "meta"],
)
def test_every_input_has_a_line(
    value: torch.Tensor, numbers: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inputs on which the oracle raises get a line with their range or the reason why there is none."""
    model = Feed()
    DebugUnderflowOverflow(model, trace_batch_nums=[0])
    model(value)
    first, second = frame(capsys.readouterr().out)
    assert first.startswith(f"{numbers} input[0]")
    assert second.startswith(f"{numbers} output")
    other = Feed()
    oracle.DebugUnderflowOverflow(other, trace_batch_nums=[0])
    with pytest.raises((RuntimeError, TypeError)):
        other(value)


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """A device mesh of one process."""
    from torch.distributed.device_mesh import init_device_mesh

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_dtensor_is_its_local_shard(mesh: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A DTensor prints the range of its local shard and says which one that is."""
    from torch.distributed.tensor import Shard, distribute_tensor

    model = Feed()
    DebugUnderflowOverflow(model, trace_batch_nums=[0])
    model(distribute_tensor(torch.tensor([2.0, -8.0]), mesh, [Shard(0)]))
    shard = "local shard: Shard(0) at mesh[0]=0 of 1, from [0]"
    assert frame(capsys.readouterr().out)[0] == f"2.00e+00 8.00e+00 input[0] ({shard})"


def test_frames_stay_bounded_after_a_trace() -> None:
    """After a traced batch the buffer still keeps max_frames_to_save frames, where the oracle's keeps all."""
    lengths = []
    for kind in (oracle.DebugUnderflowOverflow, DebugUnderflowOverflow):
        model = Feed(nn.Identity(), nn.Identity())
        watcher = kind(model, max_frames_to_save=2, trace_batch_nums=[0])
        for _ in range(10):
            model(torch.ones(1))
        lengths.append(len(watcher.frames))
    assert lengths == [27, 2]


def test_a_caught_overflow_does_not_spoil_the_next_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """After a detection that the caller caught, a clean batch runs; the oracle raises again."""
    for kind in (oracle.DebugUnderflowOverflow, DebugUnderflowOverflow):
        model = Feed(Grow())
        watcher = kind(model)
        with pytest.raises(ValueError, match=r"nan|inf"):
            model(torch.tensor([float("inf")]))
        assert watcher.detected_overflow
        capsys.readouterr()
        if kind is DebugUnderflowOverflow:
            model(torch.ones(1))
            assert capsys.readouterr().out == ""
            with pytest.raises(ValueError, match=r"nan|inf"):
                model(torch.tensor([float("inf")]))
        else:
            with pytest.raises(ValueError, match=r"nan|inf"):
                model(torch.ones(1))


def test_a_traced_overflow_does_not_spoil_the_next_batch() -> None:
    """After an overflow in a traced batch, a clean batch runs; the oracle raises in it."""
    for kind in (oracle.DebugUnderflowOverflow, DebugUnderflowOverflow):
        model = Feed(Grow())
        kind(model, trace_batch_nums=[0])
        model(torch.tensor([float("inf")]))
        if kind is DebugUnderflowOverflow:
            model(torch.ones(1))
        else:
            with pytest.raises(ValueError, match=r"nan|inf"):
                model(torch.ones(1))


class Root(nn.Module):
    """A root that overflows in its own code, after its only submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x) * 1e30


def test_the_root_is_reported_with_its_own_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """A value first seen in the root's frame belongs to the batch that made it, where the oracle says the next."""
    numbers = []
    for kind in (oracle.DebugUnderflowOverflow, DebugUnderflowOverflow):
        model = Root()
        kind(model)
        model(torch.ones(1))
        with pytest.raises(ValueError, match=r"nan|inf"):
            model(torch.full((1,), 1e30))
        text = capsys.readouterr().out
        numbers.append(int(text.split("batch_number=")[1].split()[0]))
    assert numbers == [2, 1]


def test_an_additive_mask_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """Zeros and -inf in a positional input are a mask: the line is the oracle's, and nothing is raised."""
    mask = torch.tensor([[0.0, float("-inf")], [0.0, 0.0]])
    watcher = DebugUnderflowOverflow(Feed(Grow()))
    watcher.model.parts[0].factor = 0.0  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="first seen in `output` of parts"):
        watcher.model(mask)
    assert "0.00e+00      inf input[0]\n" in capsys.readouterr().out
    oracle.DebugUnderflowOverflow(other := Feed(nn.Softmax(-1)))
    DebugUnderflowOverflow(ours := Feed(nn.Softmax(-1)))
    assert ours(mask) == 1
    with pytest.raises(ValueError, match="inf"):
        other(mask)


def test_a_complex_number_has_the_kind_of_its_modulus(capsys: pytest.CaptureFixture[str]) -> None:
    """In a frame (inf, nan) has infs, where the oracle also prints nans; `detect_overflow` prints both."""
    x = torch.complex(torch.tensor([float("inf")]), torch.tensor([float("nan")]))
    printed = []
    for kind in (oracle.DebugUnderflowOverflow, DebugUnderflowOverflow):
        kind(model := Feed())
        with pytest.raises(ValueError, match=r"nan|inf"):
            model(x)
        printed.append([line for line in capsys.readouterr().out.splitlines() if "input[0] has" in line])
    assert printed == [["input[0] has nans", "input[0] has infs"], ["input[0] has infs"]]


def test_a_shared_module_gives_one_frame_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    """A module under two parents has one hook, where the oracle registers one for each parent."""
    counts = []
    for kind in (oracle.DebugUnderflowOverflow, DebugUnderflowOverflow):
        shared = nn.Identity()
        model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
        kind(model, trace_batch_nums=[0])
        model(torch.ones(1))
        counts.append(capsys.readouterr().out.count("Identity"))
    assert counts == [4, 2]


def test_stop_removes_the_hooks() -> None:
    """stop() leaves no hook behind and may be called again; the oracle's hooks stay for ever."""
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    watcher = DebugUnderflowOverflow(model)
    assert all(len(module._forward_hooks) == 1 for module in model.modules())
    watcher.stop()
    watcher.stop()
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (3, {}, TypeError, "got int"),
        (
            nn.ReLU(),
            {"max_frames_to_save": -1},
            ValueError,
            "max_frames_to_save should be at least 0, got -1",
        ),
        (nn.ReLU(), {"trace_batch_nums": 3}, TypeError, r"trace_batch_nums .* such as \[0, 3\], got 3"),
        (nn.ReLU(), {"abort_after_batch_num": -1}, ValueError, "abort_after_batch_num .* got -1"),
    ],
)
def test_bad_arguments_are_named(
    model: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """A wrong argument is refused at once, by its value, before a hook is on; the oracle's right ones stay right."""
    with pytest.raises(error, match=message):
        DebugUnderflowOverflow(model, **options)
    if isinstance(model, nn.Module):
        assert not model._forward_hooks
    for batches in ([1], (1, 3), {1: "one"}, range(1, 10**18), None):
        for kind in (oracle.DebugUnderflowOverflow, DebugUnderflowOverflow):
            kind(nn.ReLU(), None, batches, np.int64(3))


def test_characters_that_drive_a_terminal_are_spelt(capsys: pytest.CaptureFixture[str]) -> None:
    """An escape sequence, a newline and a bidirectional mark in the name of a module and of a weight."""
    layer = nn.Linear(2, 2)
    layer.register_parameter("scale\x1b[2J", nn.Parameter(torch.full((1,), float("inf"))))
    model = nn.Sequential()
    model.add_module("layer\n\u202e", layer)
    DebugUnderflowOverflow(model)
    with pytest.raises(ValueError, match="first seen") as error:
        model(torch.ones(2))
    printed = capsys.readouterr().out
    assert r"layer\n\u202e Linear" in printed
    assert r"scale\x1b[2J has infs" in printed
    assert all(one.isprintable() for one in (printed + str(error.value)).replace("\n", ""))


def test_the_most_negative_integer_has_its_magnitude(capsys: pytest.CaptureFixture[str]) -> None:
    """int8 -128 prints 128, where abs() of the same dtype wraps to -128."""
    model = Feed()
    DebugUnderflowOverflow(model, trace_batch_nums=[0])
    model(torch.tensor([-128, 1], dtype=torch.int8))
    assert frame(capsys.readouterr().out)[0] == "1.00e+00 1.28e+02 input[0]"
