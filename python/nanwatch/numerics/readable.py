"""Which tensors can be read, and how to read them past the dispatch of subclasses and modes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..util.messages import suppressed
from . import _reference

Read = Callable[[Tensor], Tensor]
_PLAIN_TYPES = frozenset({Tensor, torch.nn.Parameter})


def unreadable(x: Tensor) -> str:
    """Return why `x` has no values that can be read, in a few words; "" when it has.

    Takes about a microsecond and reads no data. A tensor subclass with its own dispatch may still refuse to be read.
    The functions that read raise TypeError then.
    """
    if type(x) in _PLAIN_TYPES:
        return _unreadable(x)
    name = type(x).__name__
    with torch._C.DisableTorchFunction():
        if name in ("FakeTensor", "FunctionalTensor"):
            return f"{name}, no data"
        if name == "MaskedTensor":
            return "MaskedTensor, some elements have no value"
        if torch.nn.parameter.is_lazy(x):
            return "uninitialized, no shape yet"
        local = local_shard(x)
        return (unreadable(local) if local is not None else "") or _unreadable(x)


def _unreadable(x: Tensor) -> str:
    if is_functorch_wrapped_tensor(x):
        return "inside a functorch transform"
    if x.device.type == "meta":
        return "meta tensor, no data"
    if x.dtype not in _reference.FORMATS and not x.is_quantized:
        return f"dtype {dtype_name(x.dtype)} has no value per element"
    if is_plain(x) and not x._is_zerotensor() and not _has_storage_for(x):
        return "storage freed"
    return ""


def readable(x: Tensor, caller: str) -> Tensor:
    """Return `x`, or its local shard. Raise TypeError for what is not a tensor or cannot be read."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{caller} takes a torch.Tensor, got {type_name(x)}. "
            "Convert it first, for example with torch.as_tensor(x)."
        )
    if reason := unreadable(x):
        advice = (
            "It reads tensors that hold their values. Call it outside tracing, torch.func transforms and deferred "
            "initialisation; in traced code use torch.ops.nanwatch.abs_range(x)."
        )
        if x.dtype not in _reference.FORMATS:
            advice = f"Accepted dtypes: {_reference.READABLE_NAMES}. Convert it first, or look at x.view(torch.uint8)."
        kind, dtype = type_name(x), dtype_name(x.dtype)
        raise TypeError(
            f"{caller} cannot read a {kind} of dtype {dtype} on device {x.device}: {reason}. {advice}"
        )
    local = local_shard(x)
    return x if local is None else local


def local_shard(x: Tensor) -> Tensor | None:
    """Return the part of a DTensor that this process holds; None for any other tensor."""
    if type(x) is Tensor:
        return None
    # DTensor is not imported for this (0.3 s): where nobody imported it, there is none.
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(x, module.DTensor):
        return None
    local: Any = x.to_local()
    return cast(Tensor, local.wait() if hasattr(local, "wait") else local)


def dequantized(x: Tensor) -> Tensor | None:
    """Return the values of a tensor that a library's class keeps in another form; None for any other tensor.

    Such a class has a `dequantize` of its own, as those of torchao and TransformerEngine have. Takes 0.2 µs for a plain
    tensor. Copies nothing while the stream of a CUDA tensor is captured.
    """
    kind = type(x)
    if kind in _PLAIN_TYPES or kind.dequantize is Tensor.dequantize or not _reference.overrides_dispatch(x):
        return None
    try:
        if is_captured(x):
            return None
        with torch.no_grad():
            return x.dequantize()
    except Exception:
        suppressed("a quantized tensor could not be read")
        return None


def inner_tensors(x: Tensor, label: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that a subclass is made of, as its `__tensor_flatten__` names them; `x` itself of any other.

    The quantized weight `weight` yields `weight.qdata` and `weight.scale`.
    """
    if is_plain(x) or not hasattr(x, "__tensor_flatten__"):
        yield label, x
        return
    for name in x.__tensor_flatten__()[0]:
        yield from inner_tensors(getattr(x, name), f"{label}.{name}")


def is_captured(x: Tensor) -> bool:
    """Return whether any wait for the device of `x` would end a capture of the user's with an error."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing() and x.is_cuda


def _has_storage_for(x: Tensor) -> bool:
    """Return False when the storage is smaller than the tensor's extent.

    FSDP frees a parameter by resizing its storage to nothing; torch itself then reads through a null pointer.
    """
    if x.numel() == 0:
        return True
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (x.storage_offset() + last + 1) * x.element_size() <= x.untyped_storage().nbytes()


def is_plain(x: Tensor) -> bool:
    """Return whether the sizes and strides of `x` say where in its storage the elements are."""
    return (
        x.layout is torch.strided
        and not x.is_nested
        and not x.is_quantized
        and not _reference.overrides_dispatch(x)
    )


def read(operator: Read, public: Read, x: Tensor) -> Tensor:
    """Read a tensor by our operator, a subclass with its own dispatch by `public`, in operations of torch's own.

    Raises TypeError for a tensor on which some of torch's operations are missing.
    """
    if is_plain(x):
        return operator(x)
    try:
        return public(x) if _reference.overrides_dispatch(x) else operator(x)
    except Exception as error:
        raise TypeError(
            f"nanwatch cannot read a {type_name(x)} of layout {x.layout} and dtype {dtype_name(x.dtype)}: torch "
            f"refused with {type(error).__name__}: {error}. It reads what detach, reshape, abs, amin, amax and "
            "isfinite (sparse: coalesce and values) work on. Pass the dense tensor inside it, or convert it."
        ) from error


@contextmanager
def only_our_dispatch() -> Iterator[None]:
    """Read the data past `__torch_function__`, active modes and torch.jit.trace.

    Without this a user's FakeTensorMode would answer for a real tensor, a counting mode would count our operations, and
    a traced graph would hold them.
    """
    tracing = torch._C._get_tracing_state()
    if tracing is not None:
        torch._C._set_tracing_state(None)  # type: ignore[attr-defined]
    try:
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            yield
    finally:
        if tracing is not None:
            torch._C._set_tracing_state(tracing)  # type: ignore[attr-defined]


def type_name(x: object) -> str:
    """Return the class of `x` with its module, without that of builtins."""
    kind = type(x)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return `float16` for torch.float16."""
    return str(dtype).removeprefix("torch.")


class Numbers:
    """Numbers of a tensor, copied now. Those of a GPU come later, and nobody waits for them."""

    def __init__(self, x: Tensor) -> None:
        self._event: Any = None
        with torch.no_grad(), only_our_dispatch():
            x = x.detach()
            if x.device.type == "cuda":
                stream = torch.cuda.current_stream(x.device)
                x = x.to("cpu", non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record(stream)
            else:
                x = x.clone()
        self._host = x

    def wait(self) -> list[float]:
        """Return the numbers as soon as they have come."""
        if self._event is not None:
            self._event.synchronize()
        return [float(number) for number in self._host.flatten().tolist()]

    def read(self) -> list[float]:
        """Return the numbers, none as long as they have not come."""
        if self._event is not None and not self._event.query():
            return []
        return self.wait()
