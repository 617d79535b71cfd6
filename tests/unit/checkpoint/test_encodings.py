"""Encodings of GGUF: each block is read as the package gguf decodes it."""

import numpy as np
import pytest
import torch

import nanwatch
from nanwatch.checkpoint import encodings
from nanwatch.checkpoint.encodings import ENCODINGS
from support.gguf import gguf_bytes

gguf = pytest.importorskip("gguf")


@pytest.mark.parametrize("name", ENCODINGS)
def test_the_numbers_are_those_that_gguf_decodes(name, tmp_path):
    """Of any bytes, so with scales that are nan and inf; in more than one part."""
    encoding, path = ENCODINGS[name], tmp_path / "x.gguf"
    blocks = np.random.default_rng(0).integers(0, 256, (5000, encoding.bytes), dtype=np.uint8)
    path.write_bytes(gguf_bytes([("x", (encoding.elements, 5000), encoding.number, blocks.tobytes())]))
    with np.errstate(all="ignore"):
        values = gguf.dequantize(blocks, gguf.GGMLQuantizationType[name.upper()])
    (found,) = nanwatch.scan(path).tensors
    assert str(found.health) == str(nanwatch.tensor_health(torch.from_numpy(values)))
    dead = np.flatnonzero(~values.any(1)).tolist()
    assert (found.dead_rows, found.first_dead_rows) == (len(dead), tuple(dead[:5]))


def test_without_the_package_blocks_are_not_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(encodings, "find_spec", lambda name: None)
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes([("x", (32, 1), 2, bytes(18)), ("y", (4, 1), 0, bytes(16))]))
    encoded, plain = nanwatch.scan(path).tensors
    assert encoded.unread == "its blocks are decoded by the package gguf: pip install gguf"
    assert plain.health is not None


def test_a_healthy_matrix_of_four_bits_has_no_finding(tmp_path):
    """An eighth of its numbers are zero by rounding."""
    x = np.random.default_rng(0).standard_normal((64 * 8, 32)).astype(np.float32)
    blocks = gguf.quantize(x, gguf.GGMLQuantizationType.Q4_0)
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes([("x", (256, 64), ENCODINGS["q4_0"].number, blocks.tobytes())]))
    result = nanwatch.scan(path)
    assert 0.1 < result.tensors[0].health.num_zero / x.size < 0.15
    assert result.findings == ()
