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


@pytest.mark.native
@pytest.mark.parametrize("shape", [(200, 3), (7, 700), (40, 33), (3, 5000)])
def test_dead_rows_of_the_compiled_call_are_those_that_numpy_finds(shape, tmp_path):
    from nanwatch.checkpoint.stored import OpenFiles

    random = np.random.default_rng(0)
    x = random.standard_normal(shape).astype(np.float16)
    x[random.random(shape) < 0.4] = -0.0
    x[[1, shape[0] - 1]] = 0.0
    path = tmp_path / "x"
    x.tofile(path)
    tensor = StoredTensor("x", "float16", shape, path, Span(path, 0))
    row = shape[1] * 2
    places = [(0, x.nbytes), (0, x.nbytes + 1000), *((at * row, at * row + row) for at in range(shape[0]))]
    with OpenFiles() as files:
        pieces = [streaming.Piece(tensor, *one) for one in places]
        whole, cut, *found = streaming.Streamer(files, 4096).healths(pieces)
    expected = np.flatnonzero(~x.any(1)).tolist()
    assert whole[0].health(shape).num_zero == int((x == 0).sum())
    assert cut is None
    if row > 4096:
        assert whole[1] is None
    else:
        assert whole[1] == (len(expected), tuple(expected[:5]))
        assert [number for _, dead in found for number in dead.first] == expected


@pytest.mark.native
def test_one_compiled_call_reads_tensors_of_several_dtypes_and_files(tmp_path):
    from nanwatch.checkpoint.stored import OpenFiles

    random, pieces, numbers = np.random.default_rng(0), [], []
    for i, dtype in enumerate((np.float32, np.int8, np.float64, np.float16, np.bool_)):
        path, x = tmp_path / f"{i % 2}", (random.standard_normal(1000) * 2).astype(dtype)
        with path.open("ab") as file:
            pieces.append(
                streaming.Piece(
                    StoredTensor("x", x.dtype.name, (1000,), path, Span(path, file.tell())), 0, x.nbytes
                )
            )
            file.write(x.tobytes())
        numbers.append(x)
    gone = StoredTensor("x", "float32", (9,), path, Span(tmp_path / "gone", 0))
    with OpenFiles() as files:
        *found, lost = streaming.Streamer(files).healths([*pieces, streaming.Piece(gone, 0, 36)])
    for x, (health, _) in zip(numbers, found, strict=True):
        said = health.health((1000,))
        assert (said.num_zero, said.abs_max) == ((x == 0).sum(), np.abs(x.astype(np.float64)).max())
    assert lost is None


def test_vectors_and_integers_have_no_lines():
    for dtype, shape in (("float32", (9,)), ("int8", (9, 9))):
        tensor = StoredTensor("x", dtype, shape, Path("x"))
        assert [one.total for one in streaming.dead_lines(tensor, 9, 1)] == [0, 0]
