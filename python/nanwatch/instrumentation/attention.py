"""Attention logits: the largest of each head, from the arguments of attention functions, without the whole matrix.

Fused attention has no tensor of its logits. While a watch asks for them, `scaled_dot_product_attention`,
`flex_attention` and `softmax` are replaced in their modules by functions that make the user's call and then read its
arguments. The logits go to the frame of the module whose call is under way. Compiled code calls the originals.
"""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ..numerics._reference import without_repeats
from ..numerics.readable import is_captured, is_plain, only_our_dispatch, unreadable
from ..recording.events import Recorder
from ..util.visible import suppressing
from .global_hooks import Handles

BOUND = "attention logits (bound)"
LARGEST = "attention logits"
# The exact reading makes this many logits of a head at a time: 1 MiB of float32.
_TILE = 1 << 18

Reader = Callable[[Any, Any, Any], None]


@dataclass(frozen=True, slots=True)
class AttentionLogits:
    """Largest attention logits of one module by head, 0 for a head whose logits are all negative.

    `largest` comes from the latest exact reading, in batch `batch`; both are empty where there was none. `bound` is at
    least as large, and comes from the norms of queries and keys in batch `bound_batch`.
    """

    largest: tuple[float, ...]
    batch: int | None
    bound: tuple[float, ...]
    bound_batch: int | None

    def qk_clip(self, threshold: float = 100.0) -> tuple[float, ...]:
        """Return the factor by head that brings the largest logit down to `threshold`; 1 for a head below it.

        QK-clip multiplies the weights of queries and keys by the square root of this factor.
        """
        return tuple(1.0 if x <= threshold else threshold / x for x in self.largest or self.bound)


class Scores(NamedTuple):
    """Arguments that logits are made of: `query` and `key` of shape (batch, heads, tokens, width)."""

    query: Tensor
    key: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    has_exact: bool  # False where a function of the user's may change the logits

    @property
    def heads_per_key(self) -> int:
        """Return how many heads share a head of the key: 1 without grouped queries."""
        return self.query.shape[1] // self.key.shape[1]


def _sdpa_scores(
    query: Tensor,
    key: Tensor,
    value: object,
    attn_mask: Tensor | None = None,
    dropout_p: object = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: object = False,
) -> Scores | None:
    return _scores(query, key, attn_mask, is_causal, scale, has_exact=True)


def _flex_scores(
    query: Tensor,
    key: Tensor,
    value: object,
    score_mod: object = None,
    block_mask: object = None,
    scale: float | None = None,
    *_: object,
    **__: object,
) -> Scores | None:
    # A score_mod may make any logit larger. Then the bound is one on its argument.
    return _scores(query, key, None, False, scale, has_exact=score_mod is None and block_mask is None)


def _softmax_scores(input: Tensor, dim: int | None = None, *_: object, **__: object) -> Tensor | None:
    if not _is_readable(input) or not input.is_floating_point() or not input.numel():
        return None
    return input.detach() if dim in (-1, input.ndim - 1) else None


def _scores(
    query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None, *, has_exact: bool
) -> Scores | None:
    given = (query, key) if mask is None else (query, key, mask)
    if not all(map(_is_readable, given)) or not 2 <= query.ndim <= 4 or not query.numel() or not key.numel():
        return None
    query, key = _four_dims(query.detach()), _four_dims(key.detach())
    if len(query) != len(key):  # one of them is broadcast
        batch = max(len(query), len(key))
        query, key = query.expand(batch, -1, -1, -1), key.expand(batch, -1, -1, -1)
    mask = None if mask is None else mask.detach()
    scale = float(query.shape[-1] ** -0.5 if scale is None else scale)
    return Scores(query, key, mask, is_causal, scale, has_exact)


def _is_readable(x: Any) -> bool:
    if not isinstance(x, Tensor) or is_captured(x):
        return False
    return not unreadable(x) and is_plain(x) and not x.is_complex()


def _four_dims(x: Tensor) -> Tensor:
    """Return a view with a batch and heads: one head where there are three dimensions."""
    return x if x.ndim == 4 else x.unsqueeze(1) if x.ndim == 3 else x[None, None]


def bound_logits(scores: Scores) -> Tensor:
    """Return a number for each head that no logit exceeds: the largest norms of query and key, times the scale.

    An additive mask adds its largest element. The result is float32, or float64 for such queries.
    """
    query, key = scores.query, scores.key
    autocast = torch.is_autocast_enabled(query.device.type)
    is_rounded = autocast or query.element_size() < 4
    # Norms are sums of `width` squares, each rounded. Results of 8 bits of mantissa are 2**-9 off, twice.
    slack = 2.0**-6 if is_rounded else (query.shape[-1] + 16) * torch.finfo(query.dtype).eps
    keys = _largest_norms(key) * (abs(scores.scale) * (1 + slack))
    if scores.heads_per_key > 1:
        keys = keys.repeat_interleave(scores.heads_per_key)
    bound = _largest_norms(query) * keys
    if scores.mask is not None and scores.mask.is_floating_point():
        bound += without_repeats(scores.mask)[0].amax().clamp(min=0)
    return bound


def _largest_norms(x: Tensor) -> Tensor:
    """Return the largest norm of a row in each head, over the batch."""
    x = without_repeats(x)[0] if x.stride(0) == 0 else x
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norms.amax(dim=(0, 2)).to(_accumulator(x))


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def largest_logits(scores: Scores) -> Tensor:
    """Return the largest logit of each head that no mask takes away; 0 where all are negative.

    Works head by head and on some rows at a time, and leaves out the keys that a causal mask hides from all of them.
    """
    query, key, mask = scores.query, scores.key, scores.mask
    batch, heads, num_rows, _ = query.shape
    num_columns = key.shape[2]
    kind, given, dtype = query.device.type, query.dtype, _accumulator(query)
    if torch.is_autocast_enabled(kind) and dtype is torch.float32:
        given = torch.get_autocast_dtype(kind)  # the user's call has rounded its arguments to this
    if mask is not None:
        mask = mask.expand(batch, heads, num_rows, num_columns)
    rows = max(1, _TILE // num_columns)
    largest = torch.zeros(heads, dtype=dtype, device=query.device)
    with torch.autocast(kind, enabled=False):
        for item, head in itertools.product(range(batch), range(heads)):
            keys = key[item, head // scores.heads_per_key].to(given).to(dtype).mT * scores.scale
            for row in range(0, num_rows, rows):
                end = min(num_columns, row + rows) if scores.is_causal else num_columns
                logits = query[item, head, row : row + rows].to(given).to(dtype) @ keys[:, :end]
                if mask is not None:
                    logits = _masked(logits, mask[item, head, row : row + rows, :end])
                if scores.is_causal:
                    logits.tril_(row)
                largest[head] = torch.maximum(largest[head], logits.amax())
    return largest


def _masked(logits: Tensor, mask: Tensor) -> Tensor:
    return logits.masked_fill_(~mask, 0.0) if mask.dtype is torch.bool else logits.add_(mask)


class _Replacement:
    """A function to put in the place of a module's own, and the readers of its calls."""

    def __init__(self, place: ModuleType, name: str, describe: Any) -> None:
        self.place, self.name = place, name
        self.original = original = getattr(place, name)
        self.readers: list[Reader] = []
        readers = self.readers

        @functools.wraps(original)
        def watched(*args: Any, **kwargs: Any) -> Any:
            output = original(*args, **kwargs)
            if not is_compiling():
                for reader in tuple(readers):
                    with (
                        suppressing(f"a call of {name} could not be read"),
                        torch.no_grad(),
                        only_our_dispatch(),
                    ):
                        reader(describe, args, kwargs)
            return output

        self.function = watched


class _CallReader:
    """Calls `reader` after each call of a function of a module, until `remove()`."""

    _replacements: ClassVar[dict[str, _Replacement]] = {}
    _lock = threading.RLock()  # reentrant: the garbage collector may remove a reader anywhere

    def __init__(self, place: ModuleType, name: str, describe: Any, reader: Reader) -> None:
        self._reader = reader
        with self._lock:
            known = self._replacements.get(name)
            if known is None or getattr(place, name) not in (known.function, known.original):
                known = self._replacements[name] = _Replacement(place, name, describe)
            self._replacement = known
            known.readers.append(reader)
            setattr(place, name, known.function)

    def remove(self) -> None:
        """Remove the reader, and put the function back after the last one. Does nothing the second time."""
        known = self._replacement
        with self._lock:
            if self._reader in known.readers:
                known.readers.remove(self._reader)
            # Another library may have put its own function over this one, which then stays and reads nothing.
            if not known.readers and getattr(known.place, known.name) is known.function:
                setattr(known.place, known.name, known.original)


class AttentionWatch:
    """Reader of the attention logits in a recorder's batches, until `remove`.

    The bound is read in every batch, the exact value in batches 0, `every`, 2 `every`, ...
    """

    def __init__(self, recorder: Recorder, every: int) -> None:
        self._recorder = recorder
        self._every = every
        self._latest: dict[tuple[str, str], tuple[int, Tensor]] = {}  # by module and label
        reference = weakref.ref(self)

        def reader_of(method: Callable[..., None]) -> Reader:
            def reader(describe: Any, args: Any, kwargs: Any) -> None:
                if (attention := reference()) is not None:
                    method(attention, describe, args, kwargs)

            return reader

        functional = torch.nn.functional
        scores, softmax = reader_of(AttentionWatch._read_scores), reader_of(AttentionWatch._read_softmax)
        readers = [
            _CallReader(functional, "scaled_dot_product_attention", _sdpa_scores, scores),
            _CallReader(functional, "softmax", _softmax_scores, softmax),
        ]
        # Importing flex attention takes a second: nobody calls it before an import.
        if (flex := sys.modules.get("torch.nn.attention.flex_attention")) is not None:
            readers.append(_CallReader(flex, "flex_attention", _flex_scores, scores))
        self._handles = Handles(self, readers)

    def remove(self) -> None:
        """Put the functions back. Does nothing the second time."""
        self._handles.remove()

    def found(self) -> dict[str, AttentionLogits]:
        """Return the latest logits by the name of the module."""
        latest = dict(self._latest)
        logits = {}
        for name in dict.fromkeys(name for name, _ in latest):
            batch, largest = latest.get((name, LARGEST), (None, None))
            bound_batch, bound = latest.get((name, BOUND), (None, None))
            logits[name] = AttentionLogits(_numbers(largest), batch, _numbers(bound), bound_batch)
        return logits

    def _read_scores(self, scores_of: Callable[..., Scores | None], args: Any, kwargs: Any) -> None:
        call = self._recorder.call_under_way()
        if call is None or (scores := scores_of(*args, **kwargs)) is None:
            return
        batch, name, _ = call
        self._add(batch, name, BOUND, bound_logits(scores))
        if scores.has_exact and batch % self._every == 0:
            self._add(batch, name, LARGEST, largest_logits(scores))

    def _read_softmax(self, scores_of: Callable[..., Tensor | None], args: Any, kwargs: Any) -> None:
        call = self._recorder.call_under_way()
        if call is None or call[0] % self._every:
            return
        batch, name, class_name = call
        x = scores_of(*args, **kwargs)
        # Three dimensions may hold batch and heads in one, as in nn.MultiheadAttention.
        if x is not None and x.ndim == 4:
            self._add(batch, name, LARGEST, x.amax(dim=(0, 2, 3)).clamp(min=0))
        elif x is not None and x.ndim == 3 and "attention" in class_name.lower():
            self._add(batch, name, LARGEST, x.amax().reshape(1).clamp(min=0))

    def _add(self, batch: int, name: str, label: str, logits: Tensor) -> None:
        # A value that is not finite shows as the largest number: the rows of the module tell where it came from.
        most = torch.finfo(logits.dtype).max
        logits = logits.nan_to_num(nan=most, posinf=most)
        self._recorder.add_output(label, logits)
        known = self._latest.get((name, label))
        if known is not None and known[0] == batch and known[1].shape == logits.shape:
            logits = torch.maximum(known[1], logits)
        self._latest[name, label] = batch, logits


def _numbers(logits: Tensor | None) -> tuple[float, ...]:
    return () if logits is None else tuple(logits.tolist())
