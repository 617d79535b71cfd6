"""The operators torch.ops.nanwatch: their rules, and which tensors the public functions refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from nanwatch.numerics.readable import unreadable
from support.implementations import Implementation
from support.oracle import DTYPES, FLOATS_8

ops = torch.ops.nanwatch
NAN = math.nan
NO_ARITHMETIC = (*FLOATS_8, torch.uint16, torch.uint32, torch.uint64)


def _samples() -> list[torch.Tensor]:
    """Every dtype, with and without grad, in the shapes that are easy to get wrong."""
    samples = [torch.ones(2, 3).to(dtype) for dtype in DTYPES]
    samples += [torch.randn(4, dtype=dtype, requires_grad=True) for dtype in (torch.float32, torch.complex64)]
    samples += [torch.randn(6, 6)[::2, 1::3], torch.randn(3, 1).expand(3, 4)]
    samples += [torch.empty(0, 2), torch.tensor(NAN)]
    return samples


@pytest.mark.parametrize("name", ["abs_range", "health", "abs_ranges", "healths"])
def test_opcheck(name: str) -> None:
    """Schema, fake, autograd registration and AOT dispatch hold on torch's sample inputs and every dtype."""
    several = name.endswith("s")
    for x in _samples():
        # The schema test perturbs its input by arithmetic that torch has for neither float8 nor wide unsigned.
        utils = ["test_autograd_registration", "test_faketensor"]
        if x.dtype not in NO_ARITHMETIC:
            utils.append("test_schema")
        # The AOT test takes 0.1 s and is the same for all dtypes. It compares rows, and a nan is not equal to itself.
        if x.dtype in (torch.float32, torch.complex64) and not ops.abs_range(x).isnan().any():
            utils.append("test_aot_dispatch_dynamic")
        torch.library.opcheck(getattr(ops, name).default, ([x, x] if several else x,), test_utils=utils)
    x = torch.empty(5, device="meta")
    assert getattr(ops, name)([x, x] if several else x).is_meta


@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
def test_tensors_without_data_are_refused(implementation: Implementation) -> None:
    """Meta, fake, lazily shaped and masked tensors raise a TypeError that says which, and where to go."""
    from torch.masked import masked_tensor

    with FakeTensorMode():
        fake = torch.ones(3)
        fake_parameter = torch.nn.Parameter(torch.ones(3))
    cases = {
        "meta tensor, no data": torch.ones(3, device="meta"),
        "FakeTensor, no data": fake,
        "FakeTensor, no data ": fake_parameter,
        "uninitialized, no shape yet": torch.nn.LazyLinear(3).weight,
    }
    masked = masked_tensor(torch.ones(2), torch.tensor([True, False]))
    cases["MaskedTensor, some elements have no value"] = masked
    several = lambda x: implementation.abs_ranges([x])  # noqa: E731
    for reason, x in cases.items():
        assert unreadable(x) == reason.strip()
        for read in (implementation.abs_range, implementation.tensor_health, several):
            with pytest.raises(TypeError, match=reason.strip()):
                read(x)


def test_function_transforms(implementation: Implementation) -> None:
    """Inside vmap, grad and functionalize the public functions refuse, naming it, and the program is unharmed."""
    seen: list[str] = []

    def look(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(TypeError, match=r"functorch transform|functionalized"):
            implementation.abs_range(x)
        with pytest.raises(TypeError, match=r"functorch transform|functionalized"):
            implementation.tensor_health(x)
        seen.append(unreadable(x))
        return (x * x).sum()

    x = torch.arange(6.0).reshape(2, 3)
    assert torch.vmap(look)(x).tolist() == [5.0, 50.0]
    assert torch.func.grad(look)(x).tolist() == (2 * x).tolist()
    torch.func.functionalize(look)(x)
    assert len(seen) == 3
    assert all(seen)


class _Scaled(torch.Tensor):
    """A wrapper subclass without storage: its values exist only through its own dispatch."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor, scale: float) -> _Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor, scale: float) -> None:
        self.inner, self.scale = inner, scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "aten":
            raise NotImplementedError(f"{func} is unknown here")
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner.detach(), args[0].scale)
        plain = torch.utils._pytree.tree_map_only(cls, lambda x: x.inner * x.scale, args)
        return func(*plain, **(kwargs or {}))


def test_wrapper_subclass_is_read_through_public_operations(implementation: Implementation) -> None:
    """A subclass without storage that knows torch's operations, not ours, is read through those."""
    x = _Scaled(implementation.place(torch.tensor([1.0, -2.0, NAN])), 10.0)
    got = implementation.tensor_health(x)
    assert (got.finite_abs_min, got.finite_abs_max, got.first_nonfinite) == (10.0, 20.0, (2,))
    assert not implementation.abs_range(x).isfinite
    assert not implementation.abs_ranges([x])[0].isfinite
