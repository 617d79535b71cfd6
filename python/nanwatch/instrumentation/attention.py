"""Attention logits: the largest of each head, from the arguments of attention functions, without the whole matrix.

Fused attention has no tensor of its logits. While a watch asks for them, `scaled_dot_product_attention` and `softmax`
are replaced in torch.nn.functional by functions that make the user's call and then read its arguments. The logits go
to the frame of the module whose call is under way. Compiled code calls the originals.
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.nn import functional

from ..numerics.readable import is_captured, is_plain, only_our_dispatch, unreadable
from ..recording.events import Recorder
from ..util.messages import suppressing
from .global_hooks import Changes

LARGEST = "attention logits"
# The exact reading makes this many logits of a head at a time: 1 MiB of float32.
_TILE = 1 << 18


@dataclass(frozen=True, slots=True)
class AttentionLogits:
    """Largest attention logits of one module by head, in batch `batch`; 0 for a head whose logits are all negative."""

    largest: tuple[float, ...]
    batch: int


def _is_readable(x: Any) -> bool:
    is_strided = isinstance(x, Tensor) and not is_captured(x) and not unreadable(x) and is_plain(x)
    return is_strided and not x.is_complex() and x.numel() > 0


def _four_dims(x: Tensor) -> Tensor:
    """Return a view with a batch and heads: one head where there are three dimensions."""
    return x if x.ndim == 4 else x.unsqueeze(1) if x.ndim == 3 else x[None, None]


def sdpa_logits(
    class_name: str,
    query: Tensor,
    key: Tensor,
    value: object,
    attn_mask: Tensor | None = None,
    dropout_p: object = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: object = False,
) -> Tensor | None:
    """Return the largest logit of each head that no mask takes away; 0 where all are negative, None if unreadable.

    The arguments are those of scaled_dot_product_attention. Works head by head and on some rows at a time, and leaves
    out the keys that a causal mask hides from all of them.
    """
    given = (query, key) if attn_mask is None else (query, key, attn_mask)
    if not all(map(_is_readable, given)) or not 2 <= query.ndim <= 4:
        return None
    mask = None if attn_mask is None else attn_mask.detach()
    mask = _four_dims(mask) if mask is not None and mask.ndim == query.ndim else mask
    query, key = _four_dims(query.detach()), _four_dims(key.detach())
    batch = max(len(query), len(key))  # one of them may be broadcast
    query, key = (x.expand(batch, -1, -1, -1) for x in (query, key))
    heads, num_rows, width = query.shape[1:]
    num_columns = key.shape[2]
    mask = None if mask is None else mask.expand(batch, heads, num_rows, num_columns)
    kind, rounded = query.device.type, query.dtype
    dtype = torch.float64 if rounded is torch.float64 else torch.float32
    if torch.is_autocast_enabled(kind) and dtype is torch.float32:
        rounded = torch.get_autocast_dtype(kind)  # the user's call has rounded its arguments to this
    rows = max(1, _TILE // num_columns)
    largest = torch.zeros(heads, dtype=dtype, device=query.device)
    heads_per_key = heads // key.shape[1]  # 1 without grouped queries
    with torch.autocast(kind, enabled=False):
        for item, head in itertools.product(range(batch), range(heads)):
            keys = key[item, head // heads_per_key].to(rounded).to(dtype).mT
            keys = keys * float(width**-0.5 if scale is None else scale)
            for row in range(0, num_rows, rows):
                end = min(num_columns, row + rows) if is_causal else num_columns
                logits = query[item, head, row : row + rows].to(rounded).to(dtype) @ keys[:, :end]
                if mask is not None:
                    part = mask[item, head, row : row + rows, :end]
                    logits = (
                        logits.masked_fill_(~part, 0.0) if part.dtype is torch.bool else logits.add_(part)
                    )
                if is_causal:
                    logits.tril_(row)
                largest[head] = torch.maximum(largest[head], logits.amax())
    return largest


def _softmax_logits(
    class_name: str, input: Tensor, dim: int | None = None, *_: object, **__: object
) -> Tensor | None:
    if not _is_readable(input) or not input.is_floating_point() or dim not in (-1, input.ndim - 1):
        return None
    if input.ndim == 4:
        return input.detach().amax(dim=(0, 2, 3)).clamp(min=0)
    # The first dimension may be batch and heads, as in nn.MultiheadAttention.
    is_attention = input.ndim == 3 and "attention" in class_name.lower()
    return input.detach().amax().reshape(1).clamp(min=0) if is_attention else None


_watches: list[weakref.ref[AttentionWatch]] = []
_lock = threading.RLock()  # the garbage collector may end a watch anywhere


def _reading(original: Any, logits_of: Callable[..., Tensor | None]) -> Any:
    watches = _watches

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        for reference in () if is_compiling() else watches.copy():
            if (watch := reference()) is not None:
                watch.read(logits_of, args, kwargs)
        return output

    return function


def _replace_functions() -> None:
    for name, logits_of in (("scaled_dot_product_attention", sdpa_logits), ("softmax", _softmax_logits)):
        _functions.replace(functional, name, _reading(getattr(functional, name), logits_of))


_functions = Changes("torch.nn.functional", _replace_functions)


def _end(reference: weakref.ref[AttentionWatch]) -> None:
    global _watches
    with _lock:
        _watches.remove(reference)
        if not _watches:
            _functions.undo()
            _watches = []  # a function that stays, as a library has put one over it, reads for no later watch


class AttentionWatch:
    """Reader of the attention logits in a recorder's batches 0, `every`, 2 `every`, ..., until `remove`."""

    def __init__(self, recorder: Recorder, every: int) -> None:
        self._recorder, self._every = recorder, every
        self._latest: dict[str, tuple[Tensor, int]] = {}  # by module
        reference = weakref.ref(self)
        with _lock:
            _watches.append(reference)
            _functions.make()
        self._end = weakref.finalize(self, _end, reference)

    def remove(self) -> None:
        """Put the functions back. Does nothing the second time."""
        self._end()

    def latest(self) -> dict[str, AttentionLogits]:
        """Return the latest logits by the name of the module."""
        latest = dict(self._latest)
        return {name: AttentionLogits(tuple(x.tolist()), batch) for name, (x, batch) in latest.items()}

    def read(self, logits_of: Callable[..., Tensor | None], args: Any, kwargs: Any) -> None:
        """Take the logits of a call of attention, whose arguments `logits_of` reads."""
        call = self._recorder.call_under_way()
        if call is None or call[0] % self._every:
            return
        batch, name, class_name = call
        with suppressing("a call of attention could not be read"), torch.no_grad(), only_our_dispatch():
            if (logits := logits_of(class_name, *args, **kwargs)) is None:
                return
            # A value that is not finite shows as the largest number: the rows of the module tell where it came from.
            most = torch.finfo(logits.dtype).max
            logits = logits.nan_to_num(nan=most, posinf=most)
            self._recorder.add_output(LARGEST, logits)
            known, known_batch = self._latest.get(name, (logits, -1))
            if known_batch == batch and known.shape == logits.shape:
                logits = torch.maximum(known, logits)
            self._latest[name] = logits, batch
