"""Values of tensors whose elements share scales, as their libraries keep them.

Recognised are `torch.float4_e2m1fn_x2`, and by their class the tensors of torchao 0.18 (MXTensor, NVFP4Tensor,
Float8Tensor, Float8TrainingTensor) and of TransformerEngine (Float8Tensor, MXFP8Tensor). TransformerEngine's are read
by the attributes that it publishes. That code has met stand-ins with these attributes, not TransformerEngine itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..util.visible import suppressed
from .block_formats import BLOCKS_BY_NAME


def scaled_values(x: Tensor) -> Tensor | None:
    """Return each element of `x` times its scale, a copy in float32; None where `x` is no such tensor.

    The value is nan where the scale is. Takes 0.2 µs for a plain tensor. Copies nothing while the stream of a CUDA
    tensor is captured.
    """
    try:
        reader = _READERS.get(_key(x)) if type(x) not in _PLAIN else _packed if x.dtype is _PACKED else None
        if reader is None or is_captured(x):
            return None
        with torch.no_grad():
            return reader(x).float()
    except Exception:
        suppressed("a tensor with scales could not be read")
        return None


def is_captured(x: Tensor) -> bool:
    """Return whether any wait for the device of `x` would end a capture of the user's with an error."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing() and x.is_cuda


def unpacked(pairs: Tensor) -> Tensor:
    """Return the numbers of bytes that hold two float4_e2m1fn each, the first in the low half."""
    form = BLOCKS_BY_NAME["mxfp4"].element
    numbers = [form.value_of(word) for word in range(form.largest_word + 1)]
    table = torch.tensor([*numbers, *(-number for number in numbers)], device=pairs.device)
    words = torch.stack([pairs & 0xF, pairs >> 4], -1).flatten(-2)
    return table[words.int()]


_PLAIN = (Tensor, torch.nn.Parameter)
_PACKED = getattr(torch, "float4_e2m1fn_x2", None)


def _key(x: Tensor) -> tuple[str, str]:
    kind = type(x)
    return kind.__module__.partition(".")[0], kind.__name__


def _packed(x: Tensor) -> Tensor:
    return unpacked(x.view(torch.uint8))


def _dequantized(x: Any) -> Tensor:
    values: Tensor = x.dequantize(torch.float32)
    return values


def _torchao_training(x: Any) -> Tensor:
    values: Tensor = x._data.float() / x._scale
    return values


def _engine_dtype(x: Any) -> torch.dtype:
    return torch.float8_e5m2 if "E5M2" in str(x._fp8_dtype) else torch.float8_e4m3fn


def _engine_float8(x: Any) -> Tensor:
    values: Tensor = x._data.view(_engine_dtype(x)).float() * x._scale_inv
    return values


def _engine_mxfp8(x: Any) -> Tensor:
    """Read the rowwise copy; its scales are filled up to whole tiles of 128 x 4."""
    if x._rowwise_data is None:
        raise TypeError("MXFP8Tensor keeps its columnwise copy alone, which is not read")
    data: Tensor = x._rowwise_data.view(_engine_dtype(x))
    rows = data.float().flatten(0, -2)
    scales = x._rowwise_scale_inv.view(torch.float8_e8m0fnu)[: rows.shape[0], : rows.shape[1] // 32]
    values: Tensor = rows * scales.float().repeat_interleave(32, 1)
    return values.reshape(data.shape)


_READERS: Mapping[tuple[str, str], Callable[[Any], Tensor]] = {
    ("torchao", "MXTensor"): _dequantized,
    ("torchao", "NVFP4Tensor"): _dequantized,
    ("torchao", "Float8Tensor"): _dequantized,
    ("torchao", "Float8TrainingTensor"): _torchao_training,
    ("transformer_engine", "Float8Tensor"): _engine_float8,
    ("transformer_engine", "MXFP8Tensor"): _engine_mxfp8,
}
