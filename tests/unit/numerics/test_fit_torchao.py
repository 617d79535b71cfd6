"""torchao's own tensors: their values against ours, bit for bit, and how they are read."""

import pytest
import torch

from nanwatch.numerics.fit import BLOCKS_BY_NAME, _pieces, converted
from nanwatch.recording.observe import observe

pytest.importorskip("torchao")
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether all numbers are the same, zeros with their sign; any nan is a nan."""
    both_nan = got.isnan() & expected.isnan()
    return bool((both_nan | (got.view(torch.int32) == expected.view(torch.int32))).all())


TENSORS = {
    "mxfp8": lambda x: MXTensor.to_mx(x, torch.float8_e4m3fn),
    "mxfp4": lambda x: MXTensor.to_mx(x, torch.float4_e2m1fn_x2),
    "nvfp4": lambda x: NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().max())),
    "float8_rowwise": Float8Tensor.from_hp,
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_record_has_the_range_of_the_values(name: str) -> None:
    """They are read as element times scale, and a nan scale shows as nan."""
    torch.manual_seed(0)
    x = torch.randn(64, 128) * torch.logspace(-2, 2, 64)[:, None]
    row = observe(TENSORS[name](x), "weight", "weight")
    form, largest = BLOCKS_BY_NAME[name], x.abs().amax().float()
    values = torch.cat(
        [converted(blocks, form, largest)[0].flatten() for blocks in _pieces(x, form)]
    ).view_as(x)
    if name != "float8_rowwise":
        assert same(TENSORS[name](x).dequantize(torch.float32), values)
    values = values.abs()
    # torchao's inference divides by a scale where its training multiplies: the last bit differs.
    tolerance = 2.0**-22 if name == "float8_rowwise" else 0.0
    assert row.abs_min == pytest.approx(values.min().item(), rel=tolerance, abs=0)
    assert row.abs_max == pytest.approx(values.max().item(), rel=tolerance, abs=0)
    assert (row.shape, row.dtype, row.isfinite) == ((64, 128), "float32", True)
    x[3, 5] = torch.nan
    row = observe(TENSORS[name](x), "weight", "weight")
    assert row.is_fault
    assert row.health.num_nan >= 1
