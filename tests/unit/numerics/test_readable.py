"""Which tensors can be read, and in which words the others are refused."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from nanwatch.numerics.readable import dequantized, only_our_dispatch, unreadable
from nanwatch.recording.observe import observe
from support.implementations import Implementation


def test_storage_that_was_freed(implementation: Implementation) -> None:
    """A parameter whose storage was resized away, as sharding does, is an error and not a crash."""
    for numel, nbytes in ((10, 0), (10, 39)):
        x = implementation.place(torch.ones(numel))
        x.untyped_storage().resize_(nbytes)
        with pytest.raises(TypeError, match="storage freed"):
            implementation.abs_range(x)
        with pytest.raises(TypeError, match="storage freed"):
            implementation.tensor_health(x)
        assert unreadable(x) == "storage freed"
        if implementation.is_native:
            with pytest.raises(ValueError, match="freed or resized"):
                torch.ops.nanwatch.abs_range(x)


def test_a_users_mode_sees_nothing_of_a_read() -> None:
    """It counts its own operations again afterwards."""
    counted: list[str] = []

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            counted.append(str(func))
            return func(*args, **(kwargs or {}))

    x = torch.ones(2)
    with Counting():
        with only_our_dispatch():
            x.abs()
        assert counted == []
        x.abs()
    assert counted == ["aten.abs.default"]


class Scaled(torch.Tensor):
    """A tensor of bytes and a scale, as libraries have them: no operation works on it."""

    def __new__(cls, x: torch.Tensor, scale: float | None) -> Scaled:
        self = torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=torch.bfloat16)  # type: ignore[attr-defined]
        self.data_, self.scale = x.to(torch.float8_e4m3fn), scale
        return self

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        raise NotImplementedError(f"{func} is not supported")

    def dequantize(self) -> torch.Tensor:
        return self.data_.bfloat16() * self.scale


def test_a_librarys_quantized_tensor_is_read_by_its_values() -> None:
    """With its own `dequantize`; where that fails it is not checked, with the reason."""
    row = observe(Scaled(torch.tensor([[2.0, -6.0]]), 0.5), "weight", "weight")
    assert (row.shape, row.dtype, row.abs_min, row.abs_max) == ((1, 2), "bfloat16", 1.0, 3.0)
    row = observe(Scaled(torch.ones(2), float("nan")), "output", "output")
    assert row.is_fault
    assert row.health.num_nan == 2
    row = observe(Scaled(torch.ones(2), None), "weight", "weight")
    assert row.isfinite is None
    assert "cannot read a" in row.note.text
    assert dequantized(torch.ones(2)) is None
