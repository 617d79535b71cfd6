"""Fingerprints: the same bits in the same places, and nothing else."""

import random
import struct
from collections.abc import Sequence
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import nanwatch
from nanwatch.numerics.ranges import _BLOCK, SKETCH_WIDTH, sketch
from support.implementations import Implementation

ONES = 2**64 - 1
# A dtype's place is the number that its fingerprints have, also in files of earlier versions.
NUMBERS = [
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"),
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("complex32", "complex64", "complex128"),
]


def mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & ONES
    x = (x ^ x >> 27) * 0x94D049BB133111EB & ONES
    return x ^ x >> 31


def number(i: int) -> int:
    """Return output number i of SplitMix64 with the seed 0."""
    return mix((i + 1) * 0x9E3779B97F4A7C15 & ONES)


def sums(words: Sequence[int]) -> list[int]:
    """Return a number for each 1024 words."""
    found = []
    for at in range(0, len(words), 1024):
        total = 0
        for i, word in enumerate(words[at : at + 1024]):
            word = word * 0xBF58476D1CE4E5B9 & ONES
            word ^= word >> 32
            word ^= word >> 16 & 0xFFFF
            total += word * (number(i) | 1)
        found.append(total & ONES)
    return found


def oracle(x: Tensor) -> int:
    """Compute the fingerprint from the module's description, one word after the other, in Python's integers."""
    values = x.resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    data = bytes(values.reshape(-1).view(torch.uint8).tolist())
    data += bytes(-len(data) % 8)
    found = sums(struct.unpack(f"<{len(data) // 8}Q", data))
    while len(found) > 1:
        found = sums(found)
    state = number(NUMBERS.index(str(x.dtype).removeprefix("torch.")) ^ x.ndim << 32)
    for size in x.shape:
        state = number((state + size) & ONES)
    return sum(found) ^ state


def random_bits(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    numel = torch.Size(shape).numel()
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return (data % 2 if dtype is torch.bool else data).view(dtype).reshape(shape)


@pytest.mark.parametrize("name", NUMBERS)
def test_any_dtype_and_length_as_the_description_has_it(implementation: Implementation, name: str) -> None:
    dtype = getattr(torch, name)
    block = _BLOCK // dtype.itemsize
    for numel in (0, 1, block - 1, block, (65 if name == "float32" else 3) * block + 3):
        x = implementation.place(random_bits(dtype, numel))
        assert nanwatch.fingerprint(x) == oracle(x.cpu())


@settings(max_examples=30)
@given(data=st.data())
def test_any_strides_are_read_in_c_order(implementation: Implementation, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4), "sizes")
    x = random_bits(data.draw(st.sampled_from([torch.float16, torch.float32, torch.complex128])), *sizes)
    x = x.permute(data.draw(st.permutations(range(len(sizes)))))
    step = data.draw(st.integers(1, 3), "step")
    x = implementation.place(x)[..., ::step]
    if data.draw(st.booleans(), "repeated"):
        x = x.unsqueeze(0).expand(3, *x.shape)
    copied = x.clone(memory_format=torch.contiguous_format)
    assert nanwatch.fingerprint(x) == nanwatch.fingerprint(copied) == oracle(x.cpu())


def test_each_bit_and_the_signs_of_any_two_words_change_it() -> None:
    """Also the highest bits of two words, as of signs, whose sum is 0 modulo 2^64."""
    x = random_bits(torch.int64, 2 * 1024)
    flips = [x]
    for place, bit in product((0, 1, 1023, 1024), range(64)):
        flips.append(x.clone())
        flips[-1][place] ^= torch.tensor(1) << bit
    draw = random.Random(0)
    for _ in range(500):
        flips.append(x.clone())
        # Of float64, float32, float16.
        signs = draw.choice([1 << 63, 1 << 31, 1 << 63 | 1 << 31, 0x8000800080008000])
        flips[-1][draw.sample(range(1024), 2)] ^= torch.tensor(signs - (1 << 64) if signs >> 63 else signs)
    assert len({nanwatch.fingerprint(flip) for flip in flips}) == len(flips)


@pytest.mark.parametrize("change", ["noise", "rounding"])
def test_the_estimates_of_sketches_are_close_to_the_truth(change: str) -> None:
    """All rows together are within 20 %; 99 rows of 100 each within 4 standard deviations of both norms."""
    generator = torch.Generator().manual_seed(1)
    a, noise = torch.randn(2, 1024, 384, generator=generator, dtype=torch.float64)
    a[:, 7] *= 100  # as in the residual stream of large models
    b = a + 0.01 * noise if change == "noise" else a.to(torch.bfloat16).double()
    before, after = sketch(a).double(), sketch(b).double()
    truth = (b - a).norm() / a.norm()
    by_row = (b - a).norm(dim=1) / a.norm(dim=1)
    assert abs((after - before).norm() / before.norm() / truth - 1) < 0.2
    ratio = (after - before).norm(dim=1) / before.norm(dim=1) / by_row
    assert ((ratio - 1).abs() < 4 * 0.18).double().mean() > 0.99
    cosine = torch.nn.functional.cosine_similarity(a, b)
    apart = (torch.nn.functional.cosine_similarity(before, after) - cosine).abs()
    assert (apart < 4 * SKETCH_WIDTH**-0.5 * (1 - cosine**2).clamp(min=1e-12)).double().mean() > 0.99
