"""A tensor that is read part by part has the health and the fingerprint of the whole."""

import pytest
import torch

import nanwatch
from nanwatch.numerics.partial_health import BLOCK, PartialHealth


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int16, torch.complex64]
)
@pytest.mark.parametrize("bad", [(), (4100,), (4100, 700)])
def test_parts_in_any_order_and_of_several_threads_add_up(dtype, bad):
    torch.manual_seed(0)
    x = torch.randn(5000) if dtype is not torch.int16 else torch.randint(-9, 9, (5000,))
    if dtype.is_floating_point:
        for i in bad:
            x[i] = torch.nan
        x[5], x[6] = 0.0, 1e-40
    x = x.to(dtype).reshape(50, 100)
    step = 2 * BLOCK // x.element_size()
    starts = list(range(0, 5000, step))
    mine, others, plain = PartialHealth(), PartialHealth(), PartialHealth()
    for i, start in enumerate(reversed(starts)):
        (mine if i % 2 else others).add(x.flatten()[start : start + step], start)
        plain.add(x.flatten()[start : start + step], start, fingerprints=False)
    mine.merge(others)
    assert str(mine.health(x.shape)) == str(nanwatch.tensor_health(x))
    assert str(plain.health(x.shape)) == str(nanwatch.tensor_health(x))
    assert mine.fingerprint(str(dtype).removeprefix("torch."), x.shape) == nanwatch.fingerprint(x)


def test_no_part_is_an_empty_tensor():
    assert PartialHealth().health((0, 3)) == nanwatch.tensor_health(torch.empty(0, 3))


@pytest.mark.native
def test_the_compiled_part_has_the_blocks_of_the_reference():
    from nanwatch.numerics import _extension, _fingerprint

    x = torch.arange(3000, dtype=torch.int32)
    assert int(_extension.part_health(x, 7)[1]) == int(_fingerprint.sum_of_blocks(x, 7))
