"""Stand-ins for tensors with scales of libraries that are not installed."""

from __future__ import annotations

from typing import Any

import torch


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
    blocks = x.unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1)
    scales = amax.frexp().exponent - 9  # the largest element is below 2^9
    codes = (blocks / torch.exp2(scales)[..., None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    tiles = torch.full(
        (-(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 4) * 4), 255, dtype=torch.uint8
    )
    tiles[: scales.shape[0], : scales.shape[1]] = torch.where(amax.isnan(), 255, scales + 127)
    return wrapper(
        "transformer_engine", "MXFP8Tensor", tuple(x.shape),
        _rowwise_data=codes.flatten(-2).view(torch.uint8), _rowwise_scale_inv=tiles, _fp8_dtype="DType.kFloat8E4M3",
    )  # fmt: skip
