"""Where the drop-in departs from transformers on purpose; each test has a row in docs/compatibility.md."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import debug_utils as oracle

from nanwatch.integrations.debug import DebugUnderflowOverflow

INF = float("inf")


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


def traced(value: torch.Tensor, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines of the input and the output of a module, traced by the drop-in."""
    model = Feed()
    DebugUnderflowOverflow(model, trace_batch_nums=[0])
    model(value)
    _, _, after = capsys.readouterr().out.partition("Identity\n")
    return after.splitlines()[:2]


def of_both(
    make: Callable[[], nn.Module], *values: float | torch.Tensor, **options: Any
) -> Iterator[tuple[list[bool], str]]:
    """Yield for the oracle's class and the drop-in which calls raise for a value that is not finite, and the text."""
    for kind in (oracle.DebugUnderflowOverflow, DebugUnderflowOverflow):
        model, raised = make(), []
        kind(model, **options)
        with contextlib.redirect_stdout(io.StringIO()) as out:
            for value in values:
                try:
                    model(torch.as_tensor(value).reshape(-1))
                    raised.append(False)
                except ValueError as error:
                    raised.append("nan" in str(error) or "inf" in str(error))
        yield raised, out.getvalue()


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
    first, second = traced(value, capsys)
    assert first.startswith(f"{numbers} input[0]")
    assert second.startswith(f"{numbers} output")
    model = Feed()
    oracle.DebugUnderflowOverflow(model, trace_batch_nums=[0])
    with pytest.raises((RuntimeError, TypeError)):
        model(value)


def test_dtensor_is_its_local_shard(one_process_mesh: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """A DTensor prints the range of its local shard and says which one that is."""
    from torch.distributed.tensor import Shard, distribute_tensor

    x = distribute_tensor(torch.tensor([2.0, -8.0]), one_process_mesh, [Shard(0)])
    shard = "local shard: Shard(dim=0) at mesh[0]=0 of 1"
    assert traced(x, capsys)[0] == f"2.00e+00 8.00e+00 input[0] ({shard})"


def test_the_most_negative_integer_has_its_magnitude(capsys: pytest.CaptureFixture[str]) -> None:
    """int8 -128 prints 128, where abs() of the same dtype wraps to -128."""
    x = torch.tensor([-128, 1], dtype=torch.int8)
    assert traced(x, capsys)[0] == "1.00e+00 1.28e+02 input[0]"


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


@pytest.mark.parametrize(
    ("traced_batches", "outcomes"),
    [([], [[True, True, True], [True, False, True]]), ([0], [[False, True, True], [False, False, True]])],
    ids=["caught", "traced"],
)
def test_an_overflow_does_not_spoil_the_next_batch(
    traced_batches: list[int], outcomes: list[list[bool]]
) -> None:
    """After an overflow that the caller caught, or in a traced batch, a clean batch runs; the oracle raises in it."""
    both = of_both(Feed, INF, 1.0, INF, trace_batch_nums=traced_batches)
    assert [raised for raised, _ in both] == outcomes


def overflows_in_its_own_code() -> nn.Module:
    model = nn.Sequential(nn.Identity())
    model.forward = lambda x: model[0](x) * 1e30
    return model


def test_the_root_is_reported_with_its_own_batch() -> None:
    """A value first seen in the root's frame belongs to the batch that made it, where the oracle says the next."""
    both = [*of_both(overflows_in_its_own_code, 1.0, 1e30)]
    assert [raised for raised, _ in both] == [[False, True]] * 2
    assert [text.split("batch_number=")[1].split()[0] for _, text in both] == ["2", "1"]


def test_an_additive_mask_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    """Zeros and -inf in a positional input have a line, and nothing is raised, nor for a nan that is in no output."""
    mask, missing = torch.tensor([0.0, -INF]), torch.tensor([0.0, float("nan")])
    assert traced(mask, capsys)[0] == "0.00e+00      inf input[0]"
    both = [*of_both(lambda: Feed(nn.Softmax(-1)), mask), *of_both(lambda: nn.ZeroPad1d((0, -1)), missing)]
    assert [raised for raised, _ in both] == [[True], [False]] * 2


def test_a_complex_number_has_the_kind_of_its_modulus() -> None:
    """In a frame (inf, nan) has infs, where the oracle also prints nans; `detect_overflow` prints both."""
    x = torch.complex(torch.tensor([INF]), torch.tensor([float("nan")]))
    printed = [re.findall(r"input\[0\] has \w+", text) for _, text in of_both(Feed, x)]
    assert printed == [["input[0] has nans", "input[0] has infs"], ["input[0] has infs"]]


def test_a_shared_module_gives_one_frame_a_call() -> None:
    """A module under two parents has one hook, where the oracle registers one for each parent."""
    both = of_both(lambda: nn.Sequential(nn.Sequential(x := nn.Identity()), x), 1.0, trace_batch_nums=[0])
    assert [text.count("Identity") for _, text in both] == [4, 2]


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
        (nn.ReLU(), {"max_frames_to_save": -1}, ValueError, "max_frames_to_save .* got -1"),
        (nn.ReLU(), {"trace_batch_nums": 3}, TypeError, "trace_batch_nums .* got 3"),
        (nn.ReLU(), {"abort_after_batch_num": -1}, ValueError, "abort_after_batch_num .* got -1"),
    ],
)
def test_bad_arguments_are_named(
    model: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """A wrong argument is refused by its value, before a hook is on; the oracle's right ones stay right."""
    with pytest.raises(error, match=message):
        DebugUnderflowOverflow(model, **options)
    if isinstance(model, nn.Module):
        assert not model._forward_hooks
    for batches in ([1], (1, 3), {1: "one"}, range(1, 10**18), None):
        DebugUnderflowOverflow(nn.ReLU(), None, batches, np.int64(3))
