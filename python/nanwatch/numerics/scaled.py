"""Values of tensors whose elements share scales, as their libraries keep them.

Recognised are `torch.float4_e2m1fn_x2`, and by their class the tensors of torchao 0.18 (MXTensor, NVFP4Tensor,
Float8Tensor, Float8TrainingTensor) and of TransformerEngine (Float8Tensor, MXFP8Tensor). TransformerEngine's are read
by the attributes that it publishes. That code has met stand-ins with these attributes, not TransformerEngine itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..util.visible import suppressed
from .block_fit import BLOCKS_BY_NAME
from .formats import BY_NAME, NumberFormat, Scaling


class ScaledReading(NamedTuple):
    """The values of a tensor whose elements share scales, and these."""

    values: Tensor
    """float32."""
    scaling: Scaling | None
    """None for packed numbers whose scales are kept elsewhere."""


def read_scaled(x: Tensor) -> ScaledReading | None:
    """Return each element of `x` times its scale, a copy in float32; None where `x` is no such tensor.

    The value is nan where the scale is. Takes 0.2 µs for a plain tensor. Copies nothing while the stream of a CUDA
    tensor is captured.
    """
    try:
        if type(x) in _PLAIN:
            if x.dtype is not _PACKED or is_captured(x):
                return None
            return ScaledReading(unpacked(x.view(torch.uint8)), None)
        reader = _READERS.get(_key(x))
        if reader is None or is_captured(x):
            return None
        with torch.no_grad():
            parts = reader(x)
            return ScaledReading(parts.values.float(), _scaling(parts))
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
    return table[_halves(pairs).int()]


_PLAIN = (Tensor, torch.nn.Parameter)
_PACKED = getattr(torch, "float4_e2m1fn_x2", None)


class _Parts(NamedTuple):
    values: Tensor
    words: Tensor
    """Codes of the elements, one a byte."""
    element: NumberFormat
    scales: Tensor
    """By which elements are multiplied."""
    has_one: bool = False
    """Whether one scale is that of all elements."""


def _scaling(parts: _Parts) -> Scaling:
    form = parts.element
    magnitudes = parts.words & ((1 << (form.bits - 1)) - 1)
    scales = parts.scales.double().flatten()
    known = scales[scales.isfinite() & (scales > 0)]
    ends = known.aminmax() if known.numel() else None
    low, high = (None, None) if ends is None else (float(ends[0]), float(ends[1]))
    count = max(magnitudes.numel(), 1)
    return Scaling(
        element=form.name,
        scale=high if parts.has_one else None,
        smallest_scale=low,
        largest_scale=high,
        saturated=int((magnitudes == form.largest_word).sum()) / count,
        flushed=int((magnitudes == 0).sum()) / count,
    )


def _halves(pairs: Tensor) -> Tensor:
    return torch.stack([pairs & 0xF, pairs >> 4], -1).flatten(-2)


def _key(x: Tensor) -> tuple[str, str]:
    kind = type(x)
    return kind.__module__.partition(".")[0], kind.__name__


def _words(data: Tensor, dtype: Any) -> tuple[Tensor, NumberFormat]:
    """Return the codes of elements, and their format by torch's dtype or by torchao's name, such as "fp6_e3m2"."""
    form = _FORMS[str(dtype).removeprefix("torch.")]
    words = data.view(torch.uint8)
    return (_halves(words) if form.bits == 4 else words), form


_FORMS: Mapping[str, NumberFormat] = {
    **{
        name: BY_NAME[name] for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
    },
    "fp6_e3m2": BLOCKS_BY_NAME["mxfp6_e3m2"].element,
    "fp6_e2m3": BLOCKS_BY_NAME["mxfp6_e2m3"].element,
    "float4_e2m1fn_x2": BLOCKS_BY_NAME["mxfp4"].element,
}


def _torchao_mx(x: Any) -> _Parts:
    scales = x.scale.view(torch.uint8)
    if x.is_swizzled_scales:  # filled up with zeros, which else mean 2^-127
        scales = scales[scales > 0]
    scales = scales.view(torch.float8_e8m0fnu).float()
    return _Parts(x.dequantize(torch.float32), *_words(x.qdata, x.elem_dtype), scales)


def _torchao_nvfp4(x: Any) -> _Parts:
    return _Parts(x.dequantize(torch.float32), *_words(x.qdata, _PACKED), x.get_hp_scales())


def _torchao_float8(x: Any) -> _Parts:
    return _of_float8(x.dequantize(torch.float32), x.qdata, x.scale)


def _torchao_training(x: Any) -> _Parts:
    return _of_float8(x._data.float() / x._scale, x._data, 1 / x._scale.double())


def _engine_dtype(x: Any) -> torch.dtype:
    return torch.float8_e5m2 if "E5M2" in str(x._fp8_dtype) else torch.float8_e4m3fn


def _engine_float8(x: Any) -> _Parts:
    data = x._data.view(_engine_dtype(x))
    return _of_float8(data.float() * x._scale_inv, data, x._scale_inv)


def _of_float8(values: Tensor, data: Tensor, scales: Tensor) -> _Parts:
    return _Parts(values, *_words(data, data.dtype), scales, has_one=scales.numel() == 1)


def _engine_mxfp8(x: Any) -> _Parts:
    """Read the rowwise copy; its scales are filled up to whole tiles of 128 x 4."""
    if x._rowwise_data is None:
        raise TypeError("MXFP8Tensor keeps its columnwise copy alone, which is not read")
    data: Tensor = x._rowwise_data.view(_engine_dtype(x))
    rows = data.float().flatten(0, -2)
    scales = x._rowwise_scale_inv.view(torch.float8_e8m0fnu)[: rows.shape[0], : rows.shape[1] // 32].float()
    values = rows * scales.repeat_interleave(32, 1)
    return _Parts(values.reshape(data.shape), *_words(data, data.dtype), scales)


_READERS: Mapping[tuple[str, str], Callable[[Any], _Parts]] = {
    ("torchao", "MXTensor"): _torchao_mx,
    ("torchao", "NVFP4Tensor"): _torchao_nvfp4,
    ("torchao", "Float8Tensor"): _torchao_float8,
    ("torchao", "Float8TrainingTensor"): _torchao_training,
    ("transformer_engine", "Float8Tensor"): _engine_float8,
    ("transformer_engine", "MXFP8Tensor"): _engine_mxfp8,
}
