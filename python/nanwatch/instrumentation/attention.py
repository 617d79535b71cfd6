"""Attention logits: the largest of each head, from the arguments of attention functions, without the whole matrix.

Fused attention has no tensor of its logits. While a watch asks for them, the calls of `scaled_dot_product_attention`,
`flex_attention` and `softmax` are read (call_readers.py). What is found goes to the frame of the module whose call is
under way.
"""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..numerics._reference import without_repeats
from ..numerics.readable import is_plain, unreadable
from ..recording.events import Recorder
from .call_readers import Reader, aside, read_calls
from .global_hooks import Handles

BOUND = "attention logits (bound)"
LARGEST = "attention logits"
# The exact reading works in tiles. A tile of scores, with its operands and mask in float32, takes at most this.
_TILE_BYTES = 960 * 1024
# A bound this many times the first one asks for an exact reading, and so does one within 4 bits of an overflow.
_GROWTH = 8.0
_NEAR_LIMIT = 2.0**-4


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


def _is_readable(x: Tensor) -> bool:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return False
    return isinstance(x, Tensor) and not unreadable(x) and is_plain(x) and not x.is_complex()


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
    # A part of the batch at a time: the norms of all rows may be too many to hold.
    x = without_repeats(x)[0] if x.stride(0) == 0 else x
    part = max(1, 2**16 // max(1, x.shape[1] * x.shape[2]))
    if len(x) > part:
        return torch.stack([_largest_norms(y) for y in x.split(part)]).amax(dim=0)
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1)
    return norms.amax(dim=(0, 2)).to(_accumulator(x))


def _accumulator(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def largest_logits(scores: Scores) -> Tensor:
    """Return the largest logit of each head that no mask takes away, tile by tile; 0 where all are negative."""
    query, key, mask = scores.query, scores.key, scores.mask
    batch, heads, num_rows, width = query.shape
    num_keys, num_columns = key.shape[1:3]
    dtype = _accumulator(query)
    kind, given = query.device.type, query.dtype
    if torch.is_autocast_enabled(kind) and dtype is torch.float32:
        given = torch.get_autocast_dtype(kind)  # the user's call has rounded its arguments to this
    shared = scores.heads_per_key
    query = query.unflatten(1, (num_keys, shared))  # the heads of a key are rows of one matrix
    if mask is not None:
        mask = mask.expand(batch, heads, num_rows, num_columns).unflatten(1, (num_keys, shared))
    found = torch.zeros(num_keys, shared, dtype=dtype, device=query.device)
    is_copied_twice = given is not query.dtype or shared > 1
    is_copied = is_copied_twice or query.dtype is not dtype

    def memory_of(keys: int, rows: int, columns: int) -> int:
        """Return the bytes of a tile, of operands that are copied, and of its mask in the tile's format."""
        size, tile = found.element_size(), keys * shared * rows * columns
        copied = keys * (shared * rows + columns) * width * (size + 2 * is_copied_twice)
        masked = 0 if mask is None else tile if any(mask.stride()[1:3]) else rows * columns
        return size * tile + is_copied * copied + (size + 1) * masked

    # Narrow tiles leave out more of what a causal mask takes away, and wide ones take less time for each element.
    rows = 256 if mask is None and not scores.is_causal else 64 if mask is None and num_rows <= 1024 else 128
    keys, rows, columns = num_keys, min(rows, num_rows), min(512, num_columns)
    while memory_of(keys, rows, columns) > _TILE_BYTES and keys * rows * columns > 1:
        if keys > 1:
            keys = -(-keys // 2)
        else:
            rows, columns = -(-rows // 2), -(-columns // 2)
    memory = torch.empty(keys * shared * rows * columns, dtype=dtype, device=query.device)
    with torch.autocast(kind, enabled=False):
        for one, first in itertools.product(range(batch), range(0, num_keys, keys)):
            several = slice(first, first + keys)
            largest = found[several]
            for row in range(0, num_rows, rows):
                left = query[one, several, :, row : row + rows].flatten(1, 2).to(given).to(dtype)
                end = min(num_columns, row + rows) if scores.is_causal else num_columns
                for column in range(0, end, columns):
                    last = min(end, column + columns)
                    flat = memory[: left.shape[0] * left.shape[1] * (last - column)].view(*left.shape[:2], -1)
                    right = key[one, several, column:last].to(given).to(dtype).mT
                    torch.baddbmm(flat, left, right, beta=0, alpha=scores.scale, out=flat)
                    del right  # before the next one is made
                    tile = flat.unflatten(1, (shared, -1))
                    if mask is not None:
                        _apply(mask[one, several, :, row : row + rows, column:last], tile)
                    if scores.is_causal and last > row + 1:
                        tile.tril_(row - column)
                    torch.maximum(largest, tile.amax(dim=(2, 3)), out=largest)
                del left
    return found.flatten()


def _apply(mask: Tensor, tile: Tensor) -> None:
    mask = without_repeats(mask)[0]
    if mask.dtype is torch.bool:
        # Bits, since an infinity times 0 is nan. Both `where` and `masked_fill` take 5 times as long.
        bits = torch.int64 if tile.dtype is torch.float64 else torch.int32
        tile.view(bits).bitwise_and_(mask.to(torch.int8).neg_())
    else:
        tile += mask


class AttentionWatch:
    """Reader of the attention logits in a recorder's batches, until `remove`.

    The bound is read in every batch, the exact value in batches 0, `every`, 2 `every`, ..., and where a bound alarms.
    """

    def __init__(self, recorder: Recorder, every: int) -> None:
        self._recorder = recorder
        self._every = every
        self._latest: dict[tuple[str, str], tuple[int, Tensor]] = {}  # by module and label
        self._alarms: dict[str, float] = {}  # by module: the bound that asks for an exact reading
        this = weakref.ref(self)

        def read_scores(scores: Callable[..., Scores | None], args: Any, kwargs: Any) -> None:
            if (own := this()) is not None:
                own._read_scores(scores, args, kwargs)

        def read_softmax(describe: Callable[..., Tensor | None], args: Any, kwargs: Any) -> None:
            if (own := this()) is not None:
                own._read_softmax(describe, args, kwargs)

        functional = torch.nn.functional
        places: list[tuple[Any, str, Any, Reader]] = [
            (functional, "scaled_dot_product_attention", _sdpa_scores, read_scores),
            (functional, "softmax", _softmax_scores, read_softmax),
        ]
        # Importing flex attention takes a second: nobody calls it before an import.
        if (flex := sys.modules.get("torch.nn.attention.flex_attention")) is not None:
            places.append((flex, "flex_attention", _flex_scores, read_scores))
        self._handles = Handles(self, [read_calls(*place) for place in places])

    def remove(self) -> None:
        """Put the functions back. Does nothing the second time."""
        self._handles.remove()

    def found(self) -> dict[str, AttentionLogits]:
        """Return the latest logits by the name of the module."""
        latest = dict(self._latest)
        found = {}
        for name in dict.fromkeys(name for name, _ in latest):
            batch, largest = latest.get((name, LARGEST), (None, None))
            bound_batch, bound = latest.get((name, BOUND), (None, None))
            found[name] = AttentionLogits(_numbers(largest), batch, _numbers(bound), bound_batch)
        return found

    def _read_scores(self, scores_of: Callable[..., Scores | None], args: Any, kwargs: Any) -> None:
        call = self._recorder.call_under_way()
        if call is None:
            return
        batch, name, _ = call
        with aside():
            scores = scores_of(*args, **kwargs)
            if scores is None:
                return
            bound = bound_logits(scores)
            self._add(batch, name, BOUND, bound)
            # On a device the bound is not known yet, and nobody waits for it.
            alarms = bound.device.type == "cpu" and self._alarms_at(name, float(bound.max()))
            if scores.has_exact and (alarms or batch % self._every == 0):
                self._add(batch, name, LARGEST, largest_logits(scores))

    def _read_softmax(self, describe: Callable[..., Tensor | None], args: Any, kwargs: Any) -> None:
        call = self._recorder.call_under_way()
        if call is None or call[0] % self._every:
            return
        batch, name, class_name = call
        with aside():
            x = describe(*args, **kwargs)
            # Three dimensions may hold batch and heads in one, as in nn.MultiheadAttention.
            if x is not None and x.ndim == 4:
                self._add(batch, name, LARGEST, x.amax(dim=(0, 2, 3)).clamp(min=0))
            elif x is not None and x.ndim == 3 and "attention" in class_name.lower():
                self._add(batch, name, LARGEST, x.amax().reshape(1).clamp(min=0))

    def _alarms_at(self, name: str, bound: float) -> bool:
        limit = torch.finfo(torch.float32).max * _NEAR_LIMIT
        alarm = self._alarms.get(name)
        if alarm is not None and bound < alarm:
            return False
        following = max(bound, 1.0) * _GROWTH
        self._alarms[name] = min(following, limit) if bound < limit else following
        return alarm is not None

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
