"""Rows and columns without a number other than zero are found whatever the chunks."""

from pathlib import Path

import numpy as np
import pytest

from nanwatch.checkpoint import streaming
from nanwatch.checkpoint.stored import Span, StoredTensor


@pytest.mark.parametrize("shape", [(7, 5), (40, 33), (3, 200), (200, 3), (6, 4, 5)])
@pytest.mark.parametrize("chunk", [4, 200, 10_000])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_dead_lines_are_those_that_numpy_finds(shape, chunk, share, tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "CHUNK", chunk)
    random = np.random.default_rng(chunk)
    x = random.standard_normal(shape).astype(np.float32)
    x[random.random(shape) < share] = -0.0
    x[shape[0] // 2] = 0.0
    x.reshape(shape[0], -1)[:, 1] = 0.0
    path = tmp_path / "x"
    x.tofile(path)
    tensor = StoredTensor("x", "float32", shape, path, Span(path, 0))
    matrix = x.reshape(shape[0], -1)
    expected = np.flatnonzero(~matrix.any(1)).tolist(), np.flatnonzero(~matrix.any(0)).tolist()
    zeros = int((x == 0).sum())
    dead = streaming.dead_lines(tensor, zeros, 1000)
    assert tuple(list(one.first) for one in dead) == expected
    assert [one.total for one in dead] == [len(numbers) for numbers in expected]
    assert [one.first for one in streaming.dead_lines(tensor, zeros, 1)] == [
        tuple(ones[:1]) for ones in expected
    ]


def test_vectors_and_integers_have_no_lines():
    for dtype, shape in (("float32", (9,)), ("int8", (9, 9))):
        tensor = StoredTensor("x", dtype, shape, Path("x"))
        assert [one.total for one in streaming.dead_lines(tensor, 9, 1)] == [0, 0]
