"""The CUDA kernel of the fingerprint on the host: the CPU's hash of any bytes, in any order of blocks."""

from __future__ import annotations

import ctypes

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanwatch.numerics import _fingerprint
from nanwatch.numerics.formats import BY_NAME
from support.cuda_emulation import Host
from support.cuda_tensors import random_bits

GRID_BYTES = 132 * 8 * 16 << 10  # kGrid blocks of 16 warps, 1 KiB each
INVALID_VALUE = 1


def call(host: Host, x: torch.Tensor, seal: int, number: torch.Tensor) -> int:
    code: int = host.library.nanwatch_cuda_fingerprint(
        ctypes.c_void_p(x.data_ptr()),
        ctypes.c_int64(x.nbytes),
        ctypes.c_uint64(seal),
        ctypes.c_void_p(number.data_ptr()),
        0,
        None,
    )
    return code


def fingerprint(host: Host, x: torch.Tensor) -> int:
    seal = _fingerprint._split_mix(BY_NAME["uint8"].number ^ 1 << 32)
    number = torch.zeros((), dtype=torch.int64)
    assert call(host, x, _fingerprint._split_mix(seal + x.numel()), number) == 0
    return int(number)


@settings(max_examples=60)
@given(numel=st.one_of(st.integers(0, 5000), st.integers(10**5, 10**5 + 2000)), seed=st.integers(0, 9))
def test_any_number_of_bytes(host: Host, numel: int, seed: int) -> None:
    """Whole blocks and a part of one, which is read up to the last byte and not beyond."""
    x = random_bits(torch.uint8, numel, seed=seed)
    assert x.data_ptr() % 16 == 0
    assert fingerprint(host, x) == int(_fingerprint.fingerprint(x))


def test_a_warp_takes_several_blocks_in_any_order(host: Host) -> None:
    """More blocks of the hash than warps: each warp goes on."""
    x = random_bits(torch.uint8, GRID_BYTES + 50_001)
    expected = int(_fingerprint.fingerprint(x))
    for seed in (0, 3):
        host.shuffle_blocks(seed)
        host.blocks()
        assert fingerprint(host, x) == expected
        assert host.blocks() == 132 * 8 + 1  # and the one that seals
    host.shuffle_blocks(0)


def test_a_launch_that_fails_is_a_code(host: Host) -> None:
    """And leaves nothing pending for the next check of somebody else's launch."""
    host.library.cuda_host_fail_next(INVALID_VALUE)
    assert call(host, torch.ones(3), 0, torch.zeros((), dtype=torch.int64)) == INVALID_VALUE
    assert host.library.cuda_host_pending_error() == 0
