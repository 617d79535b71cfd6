"""Encodings of GGUF: blocks are read as if they were decoded, and the scales of those that are not are checked."""

from contextlib import contextmanager

import numpy as np
import pytest
import torch

import nanwatch
from nanwatch.checkpoint import streaming
from nanwatch.checkpoint.encodings import ENCODINGS
from nanwatch.checkpoint.stored import OpenFiles, Span, StoredTensor
from nanwatch.checkpoint.streaming import Piece, Streamer
from nanwatch.numerics._extension import C
from support.gguf import gguf_bytes


@pytest.mark.parametrize("is_compiled", [pytest.param(True, marks=pytest.mark.native), False])
@pytest.mark.parametrize("name", [name for name, one in ENCODINGS.items() if one.decode is None])
def test_scales_of_nan_or_inf_are_counted(name, is_compiled, tmp_path, monkeypatch):
    if not is_compiled:
        monkeypatch.setattr(streaming, "C", None)
    one, random, path = ENCODINGS[name], np.random.default_rng(0), tmp_path / "x.gguf"
    blocks = random.integers(0, 256, (500, one.bytes), dtype=np.uint8)
    scales = random.standard_normal((500, one.scales)).astype(np.float16)
    for is_bad in (False, True):
        if is_bad:
            scales[3], scales[7, -1], scales[499, 0] = np.nan, -np.inf, np.inf
        blocks[:, one.place : one.place + 2 * one.scales] = scales.view(np.uint8)
        path.write_bytes(gguf_bytes([("x", (one.elements, 500), one.number, blocks.tobytes())]))
        (found,) = nanwatch.scan(path).tensors
        assert found.bad_scales == (2 + one.scales if is_bad else 0)
        assert nanwatch.scan(path).is_sound is not is_bad


def scales_of(kind, random, count):
    """Return scales in float16, by their words."""
    match kind:
        case "weights":  # nearly every block is passed over
            return np.abs(random.standard_normal((count, 32))).max(1) / 127
        case "ascending":  # each block has a greater magnitude than all before
            return np.linspace(-1e-7, 60000, count)
        case "subnormal":
            return random.integers(-1023, 1024, count) * 2.0**-24
        case "any":
            return random.integers(0, 1 << 16, count, np.uint16).view(np.float16)
        case "largest":
            return np.where(random.random(count) < 0.5, -65504, 65504)
    scales = random.standard_normal(count)
    scales[random.random(count) < 0.1] = {"nan": np.nan, "inf": np.inf, "-inf": -np.inf, "zero": -0.0}[kind]
    return scales


@contextmanager
def held_at(level):
    """Hold the reduction at an instruction set."""
    if level not in C.cpu_capabilities():
        pytest.skip(f"this machine has no {level}")
    before = C.cpu_capability()
    C.set_cpu_capability(level)
    try:
        yield
    finally:
        C.set_cpu_capability(before)


@pytest.mark.native
@pytest.mark.parametrize("name", [name for name, one in ENCODINGS.items() if one.decode is not None])
@pytest.mark.parametrize("codes", ["any", "no zero", "many zeros", "zeros after one", "one"])
@pytest.mark.parametrize(
    "kind", ["weights", "ascending", "subnormal", "any", "largest", "nan", "inf", "-inf", "zero"]
)
@pytest.mark.parametrize("level", ["baseline", "avx2"])
def test_the_compiled_call_reads_blocks_as_if_they_were_decoded(name, codes, kind, level, tmp_path):
    encoding, random = ENCODINGS[name], np.random.default_rng(0)
    rows, width = 100, 96  # more blocks than a counter of 8 bits has room for
    count = rows * width // 32
    blocks = random.integers(0, 256, (count, encoding.bytes), np.uint8)
    zero = 0 if name == "q8_0" else 0x88
    if codes == "one":
        blocks[:] = 0x80 if name == "q8_0" else 0x00  # the most negative code throughout
    elif codes == "no zero":
        blocks[(blocks == 0) | (blocks & 0x0F == 8) | (blocks & 0xF0 == 0x80)] = 0x11
    elif codes == "zeros after one":
        blocks[1:] = zero
    elif codes == "many zeros":
        blocks[random.random(blocks.shape) < 0.5] = zero
        blocks[::3] = zero
        blocks[30:33] = zero
    blocks[:, :2] = scales_of(kind, random, count).astype(np.float16).view(np.uint8).reshape(count, 2)
    path = tmp_path / "x"
    blocks.tofile(path)
    tensor = StoredTensor("x", name, (rows, width), path, Span(path, 0))
    half = 33 * width // 32 * encoding.bytes
    with OpenFiles() as files, held_at(level):
        streamer = Streamer(files, 290 * encoding.bytes)
        expected = streamer.values(tensor, 0, tensor.numel).clone().reshape(rows, width)
        streamer = Streamer(files, 290 * encoding.bytes)
        whole, first, second = streamer.healths(
            [Piece(tensor, 0, tensor.nbytes), Piece(tensor, 0, half), Piece(tensor, half, tensor.nbytes)]
        )
    health, dead = whole
    assert str(health.health((rows, width))) == str(nanwatch.tensor_health(expected))
    numbers = torch.nonzero((expected == 0).all(1)).flatten().tolist()
    assert dead == (len(numbers), tuple(numbers[:5]))
    first[0].merge(second[0])
    assert str(first[0].health((rows, width))) == str(nanwatch.tensor_health(expected))
    assert first[1].total + second[1].total == len(numbers)


def test_a_healthy_matrix_of_four_bits_has_no_finding(tmp_path):
    """An eighth of its numbers are zero by rounding."""
    x = np.random.default_rng(0).standard_normal((64 * 8, 32)).astype(np.float32)
    scales = np.take_along_axis(x, np.abs(x).argmax(1, keepdims=True), 1) / -8
    codes = np.clip(np.rint(x / scales) + 8, 0, 15).astype(np.uint8)
    packed = codes[:, :16] | codes[:, 16:] << 4
    blocks = np.concatenate([scales.astype(np.float16).view(np.uint8), packed], 1)
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes([("x", (256, 64), ENCODINGS["q4_0"].number, blocks.tobytes())]))
    result = nanwatch.scan(path)
    assert 0.1 < result.tensors[0].health.num_zero / x.size < 0.15
    assert result.findings == ()
