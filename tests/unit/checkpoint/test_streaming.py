"""Rows and columns without a number other than zero are found whatever the chunks."""

from pathlib import Path

import numpy as np
import pytest
import torch

from nanwatch.checkpoint.stored import StoredTensor
from nanwatch.checkpoint.streaming import NonzeroLines


@pytest.mark.parametrize("shape", [(7, 5), (40, 33), (3, 200), (200, 3), (6, 4, 5)])
@pytest.mark.parametrize("chunk", [1, 4, 31, 64, 10_000])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_dead_lines_are_those_that_numpy_finds(shape, chunk, share):
    random = np.random.default_rng(chunk)
    x = random.standard_normal(shape).astype(np.float32)
    x[random.random(shape) < share] = -0.0
    x[shape[0] // 2] = 0.0
    x.reshape(shape[0], -1)[:, 1] = 0.0
    tensor = StoredTensor("x", "float32", shape, Path("x"))
    lines = NonzeroLines.of(tensor)
    flat = torch.from_numpy(x).flatten()
    for start in range(0, flat.numel(), chunk):
        part = flat[start : start + chunk]
        lines.add(part, start, int((part == 0).sum()))
    matrix = x.reshape(shape[0], -1)
    expected = np.flatnonzero(~matrix.any(1)).tolist(), np.flatnonzero(~matrix.any(0)).tolist()
    dead = lines.dead(tensor, 1000)
    assert tuple(list(one.first) for one in dead) == expected
    assert [one.total for one in dead] == [len(numbers) for numbers in expected]
    assert [one.first for one in lines.dead(tensor, 1)] == [tuple(numbers[:1]) for numbers in expected]


def test_vectors_and_integers_have_no_lines():
    assert NonzeroLines.of(StoredTensor("x", "float32", (9,), Path("x"))) is None
    assert NonzeroLines.of(StoredTensor("x", "int8", (9, 9), Path("x"))) is None
