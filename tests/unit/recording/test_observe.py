"""A look at one value, where the looking could be seen, could lie or could do harm: modes, traces and captures."""

from __future__ import annotations

from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

from nanwatch.recording.observe import observe
from nanwatch.records.note import Note
from support.watching import watch

INF = float("inf")


class Takes(nn.Module):
    """Takes anything and returns nothing."""

    def forward(self, *args: Any) -> None:
        return None


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


class Asks(TorchFunctionMode):
    """Notes what it is asked; refuses attributes if it is told to."""

    def __init__(self, *, refuses: bool = False) -> None:
        super().__init__()
        self.asked: Counter[str] = Counter()
        self.refuses = refuses

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if self.refuses and name == "__get__":
            raise RuntimeError("attribute access refused")
        self.asked[f"{name} {getattr(func, '__self__', None)}"] += 1
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
