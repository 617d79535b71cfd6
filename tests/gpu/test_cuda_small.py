"""Every way of reading and of meeting on a GPU, small enough for compute-sanitizer: `make sanitize` runs this file."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import nanwatch
from nanwatch.numerics import _extension, _reference
from support.cuda_emulation import FORMATS, same
from support.cuda_tensors import random_bits, random_finite


@pytest.fixture(scope="module")
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    if _extension.C is None or not _extension.C.cuda_compiled():
        pytest.skip(f"the compiled part has no CUDA kernels: {_extension.reason or 'built without CUDA'}")
    return torch.device("cuda", torch.cuda.current_device())


def assert_matches(x: torch.Tensor, on_gpu: torch.Tensor) -> None:
    assert same(_extension.abs_range(on_gpu).cpu(), _reference.abs_range(x))
    assert same(_extension.health(on_gpu).cpu(), _reference.health(x))
    assert nanwatch.fingerprint(on_gpu) == nanwatch.fingerprint(x)


@pytest.mark.parametrize("dtype", FORMATS, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("fill", [random_bits, random_finite])
def test_flat(cuda: torch.device, dtype: torch.dtype, fill: Callable[..., torch.Tensor]) -> None:
    """Heads, bodies and tails of one block and of several."""
    for count, start in ((0, 0), (5, 0), (40_003, 0), (40_003, 1)):
        x = fill(dtype, count)
        assert_matches(x[start:], x.to(cuda)[start:])


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:, 1:],
        lambda x: x[:, :, 1:3],
        lambda x: x.transpose(1, 4)[:, :, ::2],
        lambda x: x[::2, ::2, ::2, ::2, ::2],
        lambda x: x[:, :, :1].expand(-1, -1, 4, -1, -1),
    ],
    ids=["rows", "vectors", "elements", "plain", "expanded"],
)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fnuz, torch.bfloat16, torch.int32, torch.float64])
def test_strided(
    cuda: torch.device, dtype: torch.dtype, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Each way of walking a strided tensor."""
    for fill in (random_bits, random_finite):
        x = fill(dtype, 4 * 6 * 4 * 6 * 32).view(4, 6, 4, 6, 32)
        assert_matches(view(x), view(x.to(cuda)))


@pytest.mark.parametrize("count", [7, 300])
def test_many(cuda: torch.device, count: int) -> None:
    """Few and many tensors in a launch, flat and strided, of one block and of several."""
    formats = list(FORMATS)
    xs = [random_bits(formats[i % len(formats)], (i * 997) % 30_000) for i in range(count)]
    on_gpu = [x.to(cuda) for x in xs]
    xs += [x[::2] for x in xs[:5]]
    on_gpu += [x[::2] for x in on_gpu[:5]]
    assert same(_extension.abs_ranges(on_gpu).cpu(), torch.stack([_reference.abs_range(x) for x in xs]))


def test_at_once(cuda: torch.device) -> None:
    """The row that the kernel writes into host memory."""
    x = random_finite(torch.float16, 100_000)
    for part in (x, x[:3], x[::2]):
        assert nanwatch.abs_range(part.to(cuda)) == nanwatch.abs_range(part)
