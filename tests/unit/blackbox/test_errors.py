"""What is added to errors of memory and of a device, and to no others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from nanwatch import watch
from nanwatch.blackbox.story import read as read_black_box
from support.black_boxes import black_box, needs_box
from support.stand_in_device import stand_in

pytestmark = needs_box


class Raises(nn.Module):
    """Raises an error in its second forward."""

    def __init__(self, error: BaseException, before: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.error = error
        self.before = before
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        if self.count > 1:
            self.before()
            raise self.error
        return x


def notes_of(
    tmp_path: Path, error: BaseException, before: Callable[[], object] = lambda: None
) -> tuple[list[str], list[dict[str, object]]]:
    """Return what is added to the error, and the notes in the black box."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(Raises(error, before)))
    with black_box(tmp_path) as box, watch(model, black_box=True):
        model(torch.ones(1, 2))
        with pytest.raises(type(error)):
            model(torch.ones(1, 2))
        notes = [*read_black_box(box.path).notes]
    return getattr(error, "__notes__", []), notes


@pytest.mark.parametrize(
    ("error", "rows"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), 7),
        (MemoryError(), 8),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"), 9),
    ],
    ids=["device", "python", "torch"],
)
def test_out_of_memory_has_its_module_and_the_largest_tensors(
    tmp_path: Path, error: BaseException, rows: int
) -> None:
    """A storage counts once, whatever looks at it."""
    large = torch.zeros(rows, 1 << 18)
    views = [large[:3], large.view(-1), large.detach()]
    words, (note,) = notes_of(tmp_path, error)
    assert note["kind"] == "out of memory"
    assert note["module"] == "1.0 (Raises)"
    tensors = note["The largest tensors that Python holds"]
    assert isinstance(tensors, list)
    mine = [line for line in tensors if f"{rows}.0 MiB  1 x float32" in line]
    assert len(mine) == 1
    assert len(words) == 1
    assert "nanwatch: out of memory in 1.0 (Raises)." in words[0]
    assert f"{rows}.0 MiB  1 x float32" in words[0]
    assert len(views) == 3


def test_a_device_error_has_the_calls_that_wait(tmp_path: Path) -> None:
    """What has been delivered is no suspect."""
    error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with stand_in() as device:
        words, (note,) = notes_of(tmp_path, error, device.break_down)
    assert note["kind"] == "device error"
    assert note["Calls whose work the device had not confirmed, the oldest first"] == ["0 (Linear), batch 1"]
    assert "whose work the device had not confirmed" in words[0]


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("shapes differ"), ValueError("out of memory")])
def test_other_errors_are_left_alone(tmp_path: Path, error: BaseException) -> None:
    """Whatever they say."""
    assert notes_of(tmp_path, error) == ([], [])
