"""Calls of an engine that packs the tokens of many requests, merged into one call of each module for all tokens.

An engine computes a prompt in chunks, then token by token, and takes what it knows from a prefix cache. A token is
therefore known by its place: the number of its request, and its position there. Two runs are compared in the places
that both have computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..numerics._fingerprint import WIDTH
from .calls import CallLog, ModuleCall, recorded
from .differences import KeptTensor, Store, Tokens, sketches

# Positions of a request.
STRIDE = 1 << 24


class Places(NamedTuple):
    """Places of the tokens of a step, in the order of their rows, and of those that logits are computed for."""

    tokens: Tensor
    last: Tensor

    @classmethod
    def of(cls, parts: Sequence[tuple[int, int, int]]) -> Places:
        """Return those of parts of requests: a request's number, its first position in the step, and how many."""
        tokens = [torch.arange(count) + request * STRIDE + first for request, first, count in parts]
        return cls(torch.cat(tokens), torch.stack([one[-1] for one in tokens]))


class PackedStore(Store):
    """Copies of tensors with a row for each token of a step, or for each token that logits are computed for.

    `lead` counts the dimensions of size 1 before that of the tokens: 0 for an engine that packs them, 1 for a batch.
    """

    def __init__(self, most_bytes: int, lead: int = 0) -> None:
        super().__init__(most_bytes)
        self._lead = lead
        self._ask: Callable[[], Places] | None = None
        self._places: Places | None = None

    def begin(self, ask: Callable[[], Places] | None) -> None:
        """Begin a step. Its places are asked for when the first tensor comes; without any, nothing is kept."""
        self._ask, self._places = ask, None

    def keep(self, x: Tensor, module: nn.Module | None = None) -> KeptTensor | None:
        """Return a copy of the rows of tokens, or None for a tensor that has others."""
        if self._ask is None or not x.is_floating_point():
            return None  # ids and positions are the same by their places
        if self._places is None:
            self._places = self._ask()
        found = self._rows(x, self._places)
        if found is None:
            return None
        rows, places = found
        widths = _block_widths(module, rows.shape[-1])
        kept = [super(PackedStore, self).keep(one) for one in rows.split(widths, -1)]
        known = [one for one in kept if one is not None]
        is_sketch = any(one.is_sketch for one in known)
        if is_sketch and len(known) > 1:  # each block by itself, as the other side has the parts
            known = [one if one.is_sketch or one.shape[-1] <= WIDTH else _sketched(one) for one in known]
        return KeptTensor(tuple(rows.shape), torch.cat([one.rows for one in known], -1), is_sketch, places)

    def _rows(self, x: Tensor, places: Places) -> tuple[Tensor, Tensor] | None:
        if self._lead and x.ndim > 1:
            if len(x) != 1:
                return None
            x = x[0]
        x = x.detach()
        for known in places:
            if x.ndim and len(x) >= len(known) and (len(x) == len(known) or known is places.tokens):
                return x[: len(known)].reshape(len(known), -1), known
            if self._lead and x.ndim == 3 and x.shape[1] == len(known):  # heads before tokens
                return x.transpose(0, 1).reshape(len(known), -1), known
        return None


def _sketched(one: KeptTensor) -> KeptTensor:
    return one._replace(rows=sketches(one.rows), is_sketch=True)


def _block_widths(module: nn.Module | None, width: int) -> list[int]:
    """Return the widths of the parts of a fused projection, as vLLM's classes have them in `output_sizes`."""
    sizes = block_sizes(module)
    return sizes if sum(sizes) == width else [width]


def block_sizes(module: nn.Module | None) -> list[int]:
    """Return how many rows of a fused weight each part has; nothing for a module that is not fused."""
    sizes: Any = getattr(module, "output_partition_sizes", None) or getattr(module, "output_sizes", None)
    return list(sizes) if isinstance(sizes, list | tuple) and all(isinstance(n, int) for n in sizes) else []


class PackedRun:
    """Run of a model in steps. `calls()` has one call of each module with the rows of all of them."""

    def __init__(self, most_bytes: int, lead: int = 0) -> None:
        self._store = PackedStore(most_bytes, lead)
        self._log: CallLog | None = None
        self._parts: dict[tuple[str, int], list[ModuleCall]] = {}
        self._around: dict[tuple[str, int], tuple[str, int] | None] = {}

    @contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Record the steps that this thread makes of the model inside the block."""
        with recorded(model, self._store) as self._log:
            yield

    def step_begins(self, places: Callable[[], Places]) -> None:
        """Begin a step, whose places are asked for while the model runs."""
        self._store.begin(places)

    def step_ended(self) -> None:
        """Take the calls of the step."""
        self._store.begin(None)
        for call in [] if self._log is None else self._log.take():
            self._parts.setdefault(call.key, []).append(call)
            self._around.setdefault(call.key, None if call.parent is None else call.parent.key)

    def calls(self) -> list[ModuleCall]:
        """Return the merged calls in the order of their starts. The root holds all others, and has the logits."""
        merged = {
            key: replace(parts[0], inputs=_merged(parts, "inputs"), outputs=_merged(parts, "outputs"))
            for key, parts in self._parts.items()
        }
        for key, call in merged.items():
            around = self._around[key]
            call.parent = None if around is None else merged[around]
        outermost = sorted((one for one in merged.values() if one.parent is None), key=lambda one: one.start)
        if not outermost:
            raise ValueError("no module of the model was called: is it compiled as a whole?")
        root, last = outermost[0], outermost[-1]
        if last is not root:  # the head is called after the model
            root.outputs, root.end = last.outputs, last.end + 1
            for one in outermost[1:]:
                one.parent = root
        return sorted(merged.values(), key=lambda one: one.start)


def _merged(parts: Sequence[ModuleCall], kind: str) -> list[KeptTensor]:
    values: list[list[KeptTensor]] = [getattr(one, kind) for one in parts]
    found = []
    for i in range(min(map(len, values))):
        same = [one[i] for one in values if one[i].shape[1:] == values[0][i].shape[1:]]
        if any(one.is_sketch for one in same):
            same = [one if one.is_sketch or one.shape[-1] <= WIDTH else _sketched(one) for one in same]
        places = torch.cat([one.places for one in same if one.places is not None])
        rows = torch.cat([one.rows for one in same])
        # A request that was preempted has computed its tokens again: the latest row counts.
        order = {place: row for row, place in enumerate(places.tolist())}
        at = torch.tensor([order[place] for place in sorted(order)])
        found.append(KeptTensor((len(at), same[0].shape[-1]), rows[at], same[0].is_sketch, places[at]))
    return found


class PackedTokens(Tokens):
    """Tokens by place: two tensors are compared in the places that both have."""

    def __init__(self) -> None:
        super().__init__(None)

    def size(self, kept: KeptTensor) -> int:
        """Return the numbers of a row: how many rows there are says nothing of a module."""
        return kept.shape[-1]

    def pair(self, a: KeptTensor, b: KeptTensor) -> tuple[Tensor, Tensor] | None:
        """Return the rows of the places that both have, or None where there is none, or another width."""
        if a.places is None or b.places is None:
            return None
        at_a, at_b = torch.isin(a.places, b.places), torch.isin(b.places, a.places)
        a, b = (
            one._replace(shape=(int(at.sum()), *one.shape[1:]), rows=one.rows[at])
            for one, at in ((a, at_a), (b, at_b))
        )
        return super().pair(a, b)
