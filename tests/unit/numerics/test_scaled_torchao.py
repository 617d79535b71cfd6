"""Tensors of torchao as a record shows them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from nanwatch.numerics.block_reference import quantized
from nanwatch.recording.observe import observe

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
    """As `quantized` has them, in the dtype that the tensor shows."""
    convert, form = TENSORS[name]
    row = observe(convert(X), "weight", "weight")
    values = quantized(X, form).abs()
    # torchao's inference divides by a scale where its training multiplies: the last bit differs.
    tolerance = 2.0**-22 if name == "inference" else 0.0
    assert row.abs_min == pytest.approx(values.min().item(), rel=tolerance, abs=0)
    assert row.abs_max == pytest.approx(values.max().item(), rel=tolerance, abs=0)
    assert (row.shape, row.dtype, row.isfinite) == ((64, 128), "float32", True)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "training", "inference"])
def test_a_nan_shows(name: str) -> None:
    """Through the scale of its block, row or tensor."""
    x = X.clone()
    x[3, 5] = torch.nan
    row = observe(TENSORS[name][0](x), "weight", "weight")
    assert row.is_fault
    assert row.health is not None
    assert row.health.num_nan >= 1
