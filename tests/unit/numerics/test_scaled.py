"""Tensors with scales as a record shows them: stand-ins with the attributes of their libraries, and packed pairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nanwatch
from nanwatch.numerics.block_reference import encoded, quantized
from nanwatch.numerics.scaled import scaled_values, unpacked
from nanwatch.recording.observe import observe, read
from nanwatch.records.headroom import headroom_bits


class Wrapper(torch.Tensor):
    """A tensor subclass on which no operation works, with attributes."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], **attributes: Any) -> Wrapper:
        self = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16)  # type: ignore[attr-defined]
        vars(self).update(attributes)
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} is not supported")


def wrapper(library: str, name: str, shape: tuple[int, ...], **attributes: Any) -> torch.Tensor:
    """A tensor of a class of a library that is not installed."""
    kind = type(name, (Wrapper,), {"__module__": f"{library}.pytorch.tensor"})
    return kind(shape, **attributes)


def engine_float8(x: torch.Tensor, scale: float) -> torch.Tensor:
    """TransformerEngine's tensor with one scale: bytes, the inverse of the scale, an enumeration."""
    data = (x * scale).to(torch.float8_e4m3fn).view(torch.uint8)
    inverse = torch.tensor([1 / scale])
    return wrapper(
        "transformer_engine", "Float8Tensor", tuple(x.shape),
        _data=data, _scale_inv=inverse, _fp8_dtype="DType.kFloat8E4M3",
    )  # fmt: skip


def engine_mxfp8(x: torch.Tensor) -> torch.Tensor:
    """TransformerEngine's MX tensor: scales as bytes, filled up to tiles of 128 x 4."""
    codes, scales, _ = encoded(x, "mxfp8")
    tiles = torch.full(
        (-(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 4) * 4), 255, dtype=torch.uint8
    )
    tiles[: scales.shape[0], : scales.shape[1]] = scales.view(torch.uint8)
    return wrapper(
        "transformer_engine", "MXFP8Tensor", tuple(x.shape),
        _rowwise_data=codes, _rowwise_scale_inv=tiles, _fp8_dtype="DType.kFloat8E4M3",
    )  # fmt: skip


def test_the_range_is_that_of_the_scaled_values() -> None:
    """In the dtype that the tensor shows, whose ends the values have."""
    x = torch.tensor([[0.5, 3.0], [-1.0, 0.25]])
    row = observe(engine_float8(x, scale=64.0), "weight", "weight")
    assert (row.abs_min, row.abs_max, row.isfinite) == (0.25, 3.0, True)
    assert (row.shape, row.dtype) == ((2, 2), "bfloat16")
    assert read(engine_float8(x, scale=64.0), "weight", "weight") == row


def test_blocks_are_read_past_the_padding_of_their_scales() -> None:
    """The padding of TransformerEngine's scales is nan here, and no value is."""
    x = torch.randn(5, 96) * torch.logspace(-3, 3, 5)[:, None]
    values = scaled_values(engine_mxfp8(x))
    assert values is not None
    assert torch.equal(values, quantized(x, "mxfp8"))


def test_a_nan_scale_makes_values_nan() -> None:
    """They are counted, with the index of the first."""
    x = torch.ones(2, 64)
    x[1, 40] = torch.nan
    row = observe(engine_mxfp8(x), "output", "output")
    assert row.is_fault
    assert row.health is not None
    assert (row.health.num_nan, row.health.first_nonfinite) == (32, (1, 32))


@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this PyTorch has no packed float4")
def test_packed_pairs_are_numbers() -> None:
    """The first of a pair is in the low half of its byte. The shape is that of the bytes."""
    pairs = torch.tensor([[0x10, 0xF2], [0x7F, 0x85]], dtype=torch.uint8)
    assert unpacked(pairs).tolist() == [[0.0, 0.5, 1.0, -6.0], [-6.0, 6.0, 3.0, -0.0]]
    row = observe(pairs.view(torch.float4_e2m1fn_x2), "buffer", "buffer")
    assert (row.shape, row.dtype, row.abs_min, row.abs_max) == ((2, 2), "float4_e2m1fn_x2", 0.0, 6.0)
    assert headroom_bits(row) is None  # its scales are not known


@pytest.mark.parametrize(
    "x",
    [
        wrapper("someone", "Float8Tensor", (2, 2)),
        wrapper("torchao", "Float8Tensor", (2, 2)),
        wrapper("transformer_engine", "MXFP8Tensor", (2, 2), _rowwise_data=None),
    ],
    ids=["another library", "other attributes", "columnwise alone"],
)
def test_what_is_not_known_is_not_checked(x: torch.Tensor) -> None:
    """With the reason, and without an error in the user's run."""
    row = observe(x, "weight", "weight")
    assert row.isfinite is None
    assert row.note is not None
    assert row.note.kind == "not_checked"
    assert "cannot read a" in row.note.text, row.note.text


def test_a_plain_tensor_is_none_of_these() -> None:
    """It is read as it is."""
    assert scaled_values(torch.ones(2)) is None
    assert scaled_values(torch.nn.Parameter(torch.ones(2))) is None


class Holder(torch.nn.Module):
    """A module that returns what it was given."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()
        self.given = given

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, self.given


def test_a_watch_sees_them() -> None:
    """The frame of a module has a record of its scaled output, with the value."""
    model = Holder(engine_float8(torch.tensor([2.0, 6.0]), scale=64.0))
    with nanwatch.watch(model, on_nonfinite="record") as watch:
        model(torch.ones(2))
    record = watch.frames[-1].records[-1]
    assert (record.dtype, record.abs_max) == ("bfloat16", 6.0)
