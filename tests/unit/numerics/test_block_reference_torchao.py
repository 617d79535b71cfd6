"""Conversion to block formats against torchao's own, bit for bit."""

from __future__ import annotations

import ast
import math
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nanwatch.numerics.block_formats import BLOCKS_BY_NAME
from nanwatch.numerics.block_reference import quantized
from support.block_codes import encoded
from support.oracle import from_patterns

pytest.importorskip("torchao")
from torchao.float8.config import ScalingGranularity
from torchao.float8.float8_utils import amax_to_scale, tensor_to_amax, to_fp8_saturated
from torchao.prototype.mx_formats.kernels import unpack_uint4
from torchao.prototype.mx_formats.mx_tensor import to_dtype, to_mx
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

MX = {
    "mxfp8": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp6_e3m2": "fp6_e3m2",
    "mxfp6_e2m3": "fp6_e2m3",
    "mxfp4": torch.float4_e2m1fn_x2,
}
OTHERS = tuple(name for name in BLOCKS_BY_NAME if name not in MX)


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all numbers are the same, zeros with their sign; any nan is a nan."""
    both_nan = got.isnan() & expected.isnan()
    return bool((both_nan | (got.view(torch.int32) == expected.view(torch.int32))).all())


def bfloat16_codes() -> torch.Tensor:
    """Every number of bfloat16, of the same size in a block: subnormals, inf and nan too."""
    return from_patterns(np.arange(1 << 16).astype("u2"), torch.bfloat16).reshape(-1, 128)


@cache
def inputs() -> dict[str, torch.Tensor]:
    """Rows of 128 numbers."""
    torch.manual_seed(0)
    shuffled = bfloat16_codes().flatten()[torch.randperm(1 << 16)].reshape(-1, 128)
    sizes = torch.ldexp(torch.randn(277, 128), torch.arange(-149, 128)[:, None])
    special = torch.randn(8, 128)
    for row, value in enumerate([0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 3.4e38]):
        special[row, ::37] = value
    special[7, :96] = 0.0
    random = from_patterns(np.random.default_rng(0).integers(0, 1 << 32, 1 << 18).astype("u4"), torch.float32)
    return {
        "bfloat16 in order": bfloat16_codes(),
        "bfloat16 shuffled": shuffled,
        "float32 in order": torch.arange(0, 1 << 32, 65521)
        .to(torch.int32)
        .view(torch.float32)[: 1 << 16]
        .reshape(-1, 128),
        "float32 at random": random.reshape(-1, 128),
        "sizes": sizes,
        "special": special,
        "zeros": torch.zeros(3, 128),
    }


def elements(name: str) -> torch.Tensor:
    """Every number of the elements and every middle of two beside the largest, in blocks of any size."""
    element = BLOCKS_BY_NAME[name].element
    numbers = torch.tensor([element.value_of(word) for word in range(element.largest_word + 1)])
    values = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2])
    x = torch.nn.functional.pad(torch.cat([values, -values]), (0, -2 * len(values) % 15)).reshape(-1, 15)
    x = torch.cat([torch.full((len(x), 1), element.ends.largest), x], 1)
    return torch.nn.functional.pad(x.flatten(), (0, -x.numel() % 128)).reshape(-1, 128)


def cases(name: str) -> list[tuple[str, torch.Tensor]]:
    """All inputs; of a format with one scale for the tensor also row by row, as a nan would make all of it nan."""
    found = [*inputs().items(), ("elements", elements(name)), ("elements / 3", elements(name) / 3)]
    if name in ("nvfp4", "float8_tensorwise"):
        found += [(f"{where}, row {i}", x[i : i + 1]) for where, x in found for i in range(0, len(x), 41)]
    return found


@pytest.mark.parametrize("name", MX)
def test_mx_is_torchaos(name: str) -> None:
    """Codes, scales and values."""
    for where, x in cases(name):
        scale, data = to_mx(x, MX[name], 32)
        assert same(quantized(x, name), to_dtype(data, scale, MX[name], 32, torch.float32)), where
        got = encoded(x, name)
        assert torch.equal(got.scales.view(torch.uint8), scale.view(torch.uint8)), where
        codes = (unpack_uint4(data) if name == "mxfp4" else data).view(torch.uint8)
        has_meaning = ~got.scales.float().isnan().repeat_interleave(32, 1)
        assert torch.equal(got.codes[has_meaning], codes[has_meaning]), where


def test_nvfp4_is_torchaos() -> None:
    """Except where the scale of the tensor is 0 or its reciprocal overflows."""
    compared = 0
    for where, x in cases("nvfp4"):
        of_tensor = per_tensor_amax_to_scale(x.abs().max())
        if of_tensor == 0 or (1.0 / of_tensor).isinf():
            continue
        theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=of_tensor)
        assert same(quantized(x, "nvfp4"), theirs.dequantize(torch.float32)), where
        got = encoded(x, "nvfp4")
        assert got.tensor_scale is not None
        assert torch.equal(got.tensor_scale, of_tensor) or of_tensor.isnan(), where
        assert torch.equal(got.scales.view(torch.uint8) & 0x7F, theirs.scale.view(torch.uint8) & 0x7F), where
        has_meaning = ~got.scales.float().isnan().repeat_interleave(16, 1)
        assert torch.equal(got.codes[has_meaning], unpack_uint4(theirs.qdata)[has_meaning]), where
        compared += 1
    assert compared > 100


@pytest.mark.parametrize("name", ["float8_tensorwise", "float8_rowwise"])
def test_float8_of_training_is_torchaos(name: str) -> None:
    """As `hp_tensor_and_scale_to_float8` converts, and `to_original_precision` reads in float32."""
    rowwise = name == "float8_rowwise"
    granularity = ScalingGranularity.AXISWISE if rowwise else ScalingGranularity.TENSORWISE
    for where, x in cases(name):
        amax = tensor_to_amax(x, scaling_granularity=granularity, axiswise_dim=-1 if rowwise else None)
        scale = amax_to_scale(amax, torch.float8_e4m3fn)
        data = to_fp8_saturated(x.float() * scale, torch.float8_e4m3fn)
        assert same(quantized(x, name), data.float() / scale), where
        got = encoded(x, name)
        assert torch.equal(got.codes[~data.isnan()], data.view(torch.uint8)[~data.isnan()]), where
        assert same(got.scales.flatten(), scale.flatten()), where


def blockwise(name: str) -> Any:
    """A function of torchao's file of blockwise kernels, whose import needs Triton."""
    spec = find_spec("torchao")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent / "prototype/blockwise_fp8_training/kernels.py"
    tree = ast.parse(source.read_text(encoding="utf-8"))
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    scope: dict[str, Any] = {"torch": torch, "e4m3_dtype": torch.float8_e4m3fn, "EPS": 1e-12}
    exec(compile(ast.Module([function], []), str(source), "exec"), scope)
    return scope[name]


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("float8_block1x128", "torch_blockwise_scale_act_quant_lhs"),
        ("float8_block128x128", "torch_blockwise_scale_weight_quant"),
    ],
)
def test_float8_in_blocks_is_torchaos(name: str, function: str) -> None:
    """Blocks of 1x128 and 128x128 equal what the references beside torchao's kernels convert."""
    convert = blockwise(function)
    for where, x in cases(name):
        if name == "float8_block128x128":
            x = torch.nn.functional.pad(x, (0, 0, 0, -len(x) % 128))
        data, inverse = convert(x)
        rows = 128 if name == "float8_block128x128" else 1
        each = inverse.repeat_interleave(rows, 0).repeat_interleave(128, 1)
        assert same(quantized(x, name), data.float() * each), where
        got = encoded(x, name)
        assert torch.equal(got.codes[~data.isnan()], data.view(torch.uint8)[~data.isnan()]), where
        assert same(got.scales.contiguous(), inverse.contiguous()), where
