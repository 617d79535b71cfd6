"""Values in block formats against torchao's own conversions, bit for bit."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
import torch

from nanwatch.numerics.block_fit import BLOCKS_BY_NAME
from nanwatch.recording.observe import observe
from support.block_values import values_in
from support.oracle import from_patterns

pytest.importorskip("torchao")
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax, to_fp8_saturated
from torchao.prototype.mx_formats.mx_tensor import MXTensor, to_dtype, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

MX = {
    "mxfp8": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp6_e3m2": "fp6_e3m2",
    "mxfp6_e2m3": "fp6_e2m3",
    "mxfp4": torch.float4_e2m1fn_x2,
}


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all numbers are the same, zeros with their sign; any nan is a nan."""
    both_nan = got.isnan() & expected.isnan()
    return bool((both_nan | (got.view(torch.int32) == expected.view(torch.int32))).all())


@cache
def inputs() -> dict[str, torch.Tensor]:
    """Rows of 128 numbers: every one of bfloat16, of any size, nan, inf and zeros among others."""
    torch.manual_seed(0)
    every = from_patterns(np.arange(1 << 16).astype("u2"), torch.bfloat16)
    special = torch.randn(8, 128)
    for row, value in enumerate([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 3.4e38]):
        special[row, ::37] = value
    random = from_patterns(np.random.default_rng(0).integers(0, 1 << 32, 1 << 18).astype("u4"), torch.float32)
    return {
        "bfloat16 in order": every.reshape(-1, 128),
        "bfloat16 shuffled": every[torch.randperm(1 << 16)].reshape(-1, 128),
        "float32 at random": random.reshape(-1, 128),
        "sizes": torch.ldexp(torch.randn(277, 128), torch.arange(-149, 128)[:, None]),
        "special": special,
    }


def cases(name: str) -> list[tuple[str, torch.Tensor]]:
    """All inputs; of a format with one scale for the tensor also row by row, as a nan would make all of it nan."""
    found = [*inputs().items()]
    if name in ("nvfp4", "float8_tensorwise"):
        found += [(f"{where}, row {i}", x[i : i + 1]) for where, x in found for i in range(0, len(x), 41)]
    return found


@pytest.mark.parametrize("name", MX)
def test_mx_is_torchaos(name: str) -> None:
    """By values in float32."""
    for where, x in cases(name):
        scale, data = to_mx(x, MX[name], 32)
        assert same(values_in(x, name), to_dtype(data, scale, MX[name], 32, torch.float32)), where


def test_nvfp4_is_torchaos() -> None:
    """Except where the scale of the tensor is 0 or its reciprocal overflows."""
    compared = 0
    for where, x in cases("nvfp4"):
        of_tensor = per_tensor_amax_to_scale(x.abs().max())
        if of_tensor != 0 and not (1.0 / of_tensor).isinf():
            theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=of_tensor)
            assert same(values_in(x, "nvfp4"), theirs.dequantize(torch.float32)), where
            compared += 1
    assert compared > 80


@pytest.mark.parametrize("name", ["float8_tensorwise", "float8_rowwise"])
def test_float8_of_training_is_torchaos(name: str) -> None:
    """As `hp_tensor_and_scale_to_float8` converts, and `to_original_precision` reads in float32."""
    rowwise = BLOCKS_BY_NAME[name].rows == 1
    granularity = ScalingGranularity.AXISWISE if rowwise else ScalingGranularity.TENSORWISE
    for where, x in cases(name):
        amax = tensor_to_amax(x, scaling_granularity=granularity, axiswise_dim=-1 if rowwise else None)
        scale = amax_to_scale(amax, torch.float8_e4m3fn)
        data = to_fp8_saturated(x.float() * scale, torch.float8_e4m3fn)
        assert same(values_in(x, name), data.float() / scale), where


TENSORS = {
    "mxfp8": lambda x: MXTensor.to_mx(x, torch.float8_e4m3fn),
    "mxfp4": lambda x: MXTensor.to_mx(x, torch.float4_e2m1fn_x2),
    "nvfp4": lambda x: NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max())),
    "float8_rowwise": Float8Tensor.from_hp,
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_record_has_the_range_of_the_values(name: str) -> None:
    """torchao's own tensors are read as element times scale, and a nan scale shows as nan."""
    torch.manual_seed(0)
    x = torch.randn(64, 128) * torch.logspace(-2, 2, 64)[:, None]
    row = observe(TENSORS[name](x), "weight", "weight")
    values = values_in(x, name).abs()
    # torchao's inference divides by a scale where its training multiplies: the last bit differs.
    tolerance = 2.0**-22 if name == "float8_rowwise" else 0.0
    assert row.abs_min == pytest.approx(values.min().item(), rel=tolerance, abs=0)
    assert row.abs_max == pytest.approx(values.max().item(), rel=tolerance, abs=0)
    assert (row.shape, row.dtype, row.isfinite) == ((64, 128), "float32", True)
    x[3, 5] = torch.nan
    row = observe(TENSORS[name](x), "weight", "weight")
    assert row.is_fault
    assert row.health is not None
    assert row.health.num_nan >= 1
