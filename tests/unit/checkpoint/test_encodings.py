"""Encodings of GGUF: the scales of blocks that are not decoded are still checked."""

import numpy as np
import pytest

from nanwatch.checkpoint.encodings import ENCODINGS, bad_scales


@pytest.mark.parametrize("name", [name for name, one in ENCODINGS.items() if one.decode is None])
def test_blocks_with_a_scale_of_nan_or_inf_are_counted(name):
    one = ENCODINGS[name]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (500, one.bytes), dtype=np.uint8)
    scales = random.standard_normal((500, len(one.scales))).astype(np.float16)
    scales[3], scales[7, -1], scales[499, 0] = np.nan, -np.inf, np.inf
    for column, at in enumerate(one.scales):
        blocks[:, at : at + 2] = scales[:, [column]].view(np.uint8)
    assert bad_scales(one, blocks) == 3
    scales[[3, 7, 499]] = 65504
    for column, at in enumerate(one.scales):
        blocks[:, at : at + 2] = scales[:, [column]].view(np.uint8)
    assert bad_scales(one, blocks) == 0
