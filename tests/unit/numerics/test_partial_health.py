"""A tensor that is read part by part has the health and the fingerprint of the whole."""

import pytest
import torch

import nanwatch
from nanwatch.numerics._fingerprint import BLOCK
from nanwatch.numerics.ranges import PartialHealth


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.complex64]
)
@pytest.mark.parametrize("bad", [(), (41_000,), (41_000, 700)])
def test_parts_add_up(dtype, bad):
    torch.manual_seed(0)
    x = torch.randn(50_000) if dtype is not torch.int16 else torch.randint(-9, 9, (50_000,))
    if dtype.is_floating_point:
        for i in bad:
            x[i] = torch.nan
        x[5], x[6] = 0.0, 1e-40
    x = x.to(dtype).reshape(500, 100)
    step = 2 * BLOCK // x.element_size()
    parts = PartialHealth()
    for start in range(0, 50_000, step):
        part = x.flatten()[start : start + step]
        parts.add(part, start)
        parts.add_bits(part)
    assert str(parts.health(x.shape)) == str(nanwatch.tensor_health(x))
    assert parts.fingerprint(str(dtype).removeprefix("torch."), x.shape) == nanwatch.fingerprint(x)


def test_no_part_is_an_empty_tensor():
    assert PartialHealth().health((0, 3)) == nanwatch.tensor_health(torch.empty(0, 3))
