"""Tensors of torchao as a record shows them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from nanwatch.numerics.block_fit import BLOCKS_BY_NAME
from nanwatch.recording.observe import observe
from nanwatch.records.headroom import headroom_bits
from support.block_values import values_in

pytest.importorskip("torchao")
from torchao.float8.float8_training_tensor import hp_tensor_and_scale_to_float8
from torchao.float8.float8_utils import tensor_to_scale
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

X = torch.randn(64, 128, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 64)[:, None]


def _training(x: torch.Tensor) -> torch.Tensor:
    scale = tensor_to_scale(x, torch.float8_e4m3fn)
    return hp_tensor_and_scale_to_float8(x, scale, torch.float8_e4m3fn)


TENSORS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "mxfp8": (lambda x: MXTensor.to_mx(x, torch.float8_e4m3fn), "mxfp8"),
    "swizzled": (
        lambda x: MXTensor.to_mx(x, torch.float8_e4m3fn, is_swizzled_scales=True),
        "mxfp8",
    ),
    "mxfp6": (lambda x: MXTensor.to_mx(x, "fp6_e3m2"), "mxfp6_e3m2"),
    "mxfp4": (lambda x: MXTensor.to_mx(x, torch.float4_e2m1fn_x2), "mxfp4"),
    "nvfp4": (
        lambda x: NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max())),
        "nvfp4",
    ),
    "training": (_training, "float8_tensorwise"),
    "inference": (Float8Tensor.from_hp, "float8_rowwise"),
}


@pytest.mark.parametrize("name", TENSORS)
def test_the_range_is_that_of_the_values(name: str) -> None:
    """As would_fit has them, in the dtype that the tensor shows."""
    convert, form = TENSORS[name]
    row = observe(convert(X), "weight", "weight")
    values = values_in(X, form).abs()
    # torchao's inference divides by a scale where its training multiplies: the last bit differs.
    tolerance = 2.0**-22 if name == "inference" else 0.0
    assert row.abs_min == pytest.approx(values.min().item(), rel=tolerance, abs=0)
    assert row.abs_max == pytest.approx(values.max().item(), rel=tolerance, abs=0)
    assert (row.shape, row.dtype, row.isfinite) == ((64, 128), "float32", True)


@pytest.mark.parametrize("name", TENSORS)
def test_the_scales_and_shares_are_torchaos(name: str) -> None:
    """By the values that torchao has for every number that a block could hold, in float64."""
    x = X.clone()
    x[:, 64:96] = 0.0
    tensor: Any = TENSORS[name][0](x)
    scaling = observe(tensor, "weight", "weight").scaling
    assert scaling is not None
    values = values_in(x, TENSORS[name][1]).double()
    assert scaling.flushed == (values == 0).double().mean().item()
    form = BLOCKS_BY_NAME[TENSORS[name][1]]
    largest = form.element.ends.largest
    assert scaling.scale == (scaling.largest_scale if name == "training" else None)
    blocks = values.reshape(64, -1, form.columns or 128) if form.rows else values.flatten()
    held = [one * largest for one in (scaling.smallest_scale, scaling.largest_scale) if one]
    # A block whose largest number is the format's own is at one of the ends that its scale gives it.
    assert blocks.abs().max().item() <= held[1] * (1 + 2**-22)
    assert held[0] <= blocks.abs().amax(-1).masked_fill(blocks.abs().amax(-1) == 0, math.inf).min().item() * 2
    if form.name.startswith("mx"):
        exponents = x.unflatten(-1, (-1, 32)).abs().amax(-1).frexp().exponent - math.frexp(largest)[1]
        at_end = blocks.reshape(64, -1, 32).abs() == largest * torch.exp2(exponents)[..., None]
        assert scaling.saturated == at_end.double().mean().item() > 0


@pytest.mark.parametrize("scale", [2.0**-3, 40.0])
def test_the_ends_are_those_under_an_older_scale(scale: float) -> None:
    """torchao's own values of every number of the format, under a scale that was not made from the tensor."""
    by = torch.tensor(scale)
    row = observe(hp_tensor_and_scale_to_float8(X, by, torch.float8_e4m3fn), "input[0]", "input")
    every = torch.arange(1, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    held = every.double() / by.double()
    assert row.ends is not None
    assert row.ends == pytest.approx((held[-1].item(), held[7].item(), held[0].item()), rel=1e-12)
    assert row.abs_max is not None
    assert headroom_bits(row) == pytest.approx(math.log2(held[-1].item() / row.abs_max), abs=1e-6)
    assert row.has_stale_scale == (scale > 1)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "training", "inference"])
def test_a_nan_shows(name: str) -> None:
    """Through the scale of its block, row or tensor."""
    x = X.clone()
    x[3, 5] = torch.nan
    row = observe(TENSORS[name][0](x), "weight", "weight")
    assert row.is_fault
    assert row.health is not None
    assert row.health.num_nan >= 1
