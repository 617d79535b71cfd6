"""Calls of an engine that packs the tokens of many requests, merged into one call of each module for all tokens.

An engine computes a prompt in chunks, then token by token, and takes what it knows from a prefix cache. A token is
therefore known by its place: the number of its request, and its position there. Two runs are compared in the places
that both have computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..numerics._fingerprint import WIDTH
from ..numerics.ranges import fingerprint
from .calls import CallLog, ModuleCall, recorded
from .differences import KeptTensor, Store, Tokens, sketches

# Positions of a request.
STRIDE = 1 << 24


class Places(NamedTuple):
    """Places of the tokens of a step, in the order of their rows, and of those that logits are computed for."""

    tokens: Tensor
    last: Tensor

    @classmethod
    def of(cls, parts: Sequence[tuple[int, int, int]], keep: int = 1) -> Places:
        """Return those of parts of requests: a request's number, its first position in the step, and how many.

        Logits are computed for the last `keep` tokens of each part.
        """
        tokens = [torch.arange(count) + request * STRIDE + first for request, first, count in parts]
        return cls(torch.cat(tokens), torch.cat([one[-keep:] for one in tokens]))


class PackedStore(Store):
    """Copies of tensors with a row for each token of a step, or for each token that logits are computed for.

    `lead` counts the dimensions of size 1 before that of the tokens: 0 for an engine that packs them, 1 for a batch.
    """

    def __init__(self, most_bytes: int, lead: int = 0) -> None:
        super().__init__(most_bytes)
        self._lead = lead
        self.ask: Callable[[], Places] | None = None

    def keep(self, x: Tensor, module: nn.Module | None = None) -> KeptTensor | None:
        """Return a copy of the rows of tokens, or None for a tensor that has others, and outside a step."""
        if self.ask is None or not x.is_floating_point():
            return None  # ids and positions are the same by their places
        found = self._rows(x.detach(), self.ask())
        if found is None:
            return None
        rows, places = found
        size, widths = rows.numel() * rows.element_size(), _widths(module, rows.shape[-1])
        if is_sketch := size > self._left and max(widths) > WIDTH:
            copy = _sketched(rows, widths).cpu()
        else:
            self._left -= size
            copy = rows.to("cpu", copy=True)
        return KeptTensor(tuple(rows.shape), copy, is_sketch, places)

    def _rows(self, x: Tensor, places: Places) -> tuple[Tensor, Tensor] | None:
        if self._lead and x.ndim > 1:
            if len(x) != 1:
                return None
            x = x[0]
        for known in places:
            if x.ndim and len(x) >= len(known) and (len(x) == len(known) or known is places.tokens):
                return x[: len(known)].reshape(len(known), -1), known
            if self._lead and x.ndim == 3 and x.shape[1] == len(known):  # heads before tokens
                return x.transpose(0, 1).reshape(len(known), -1), known
        return None


def _sketched(rows: Tensor, widths: Sequence[int]) -> Tensor:
    """Return sketches of each block by itself, as the other side has the parts; narrow blocks as they are."""
    parts = rows.split(list(widths), -1)
    return torch.cat([sketches(one) if one.shape[-1] > WIDTH else one for one in parts], -1)


def _widths(module: nn.Module | None, width: int) -> list[int]:
    """Return the widths of the parts of a fused projection."""
    sizes = block_sizes(module)
    return sizes if sum(sizes) == width else [width]


def block_sizes(module: nn.Module | None) -> list[int]:
    """Return how many rows of a fused weight each part has, as vLLM's classes tell; nothing for other modules."""
    sizes: Any = getattr(module, "output_partition_sizes", None) or getattr(module, "output_sizes", None)
    return list(sizes) if isinstance(sizes, list | tuple) and all(isinstance(n, int) for n in sizes) else []


class PackedRun:
    """Run of a model in steps. `calls()` has one call of each module with the rows of all of them.

    `steps` has the step in which each place was computed, from 0.
    """

    def __init__(self, most_bytes: int, lead: int = 0) -> None:
        self.steps: dict[int, int] = {}
        self._count = 0
        self._store = PackedStore(most_bytes, lead)
        self._log: CallLog | None = None
        self._parts: dict[tuple[str, int], list[ModuleCall]] = {}

    @contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Record the steps that this thread makes of the model inside the block."""
        with recorded(model, self._store) as self._log:
            yield

    def step_begins(self, ask: Callable[[], Places]) -> None:
        """Begin a step. Its places are asked for when the first tensor comes."""

        @cache
        def places() -> Places:
            found = ask()
            self.steps = dict.fromkeys(found.tokens.tolist(), self._count) | self.steps
            return found

        self._store.ask = places

    def step_ended(self) -> None:
        """Take the calls of the step."""
        self._store.ask = None
        self._count += 1
        for call in [] if self._log is None else self._log.take():
            self._parts.setdefault(call.key, []).append(call)

    def calls(self) -> list[ModuleCall]:
        """Return the merged calls in the order of their starts. The root holds all others, and has the logits.

        Values of the same numbers are one object, by which calls that were given one tensor are known.
        """
        known: dict[tuple[Any, ...], KeptTensor] = {}
        merged = {
            key: replace(
                parts[0], inputs=_merged(parts, "inputs", known), outputs=_merged(parts, "outputs", known)
            )
            for key, parts in self._parts.items()
        }
        for call in merged.values():
            call.parent = None if call.parent is None else merged[call.parent.key]
        outermost = sorted((one for one in merged.values() if one.parent is None), key=lambda one: one.start)
        if not outermost:
            raise ValueError("no module of the model was called: is it compiled as a whole?")
        root, last = outermost[0], outermost[-1]
        if last is not root:  # the head is called after the model
            root.outputs, root.end = last.outputs, last.end + 1
            for one in outermost[1:]:
                one.parent = root
        return sorted(merged.values(), key=lambda one: one.start)


def _merged(
    parts: Sequence[ModuleCall], kind: str, known: dict[tuple[Any, ...], KeptTensor]
) -> list[KeptTensor]:
    values: list[list[KeptTensor]] = [getattr(one, kind) for one in parts]
    module = parts[0].module if kind == "outputs" else None
    found = []
    for i in range(min(map(len, values))):
        same = [one[i] for one in values if one[i].shape[1:] == values[0][i].shape[1:]]
        width, is_sketch = same[0].shape[-1], any(one.is_sketch for one in same)
        widths = _widths(module, width)
        rows = torch.cat(
            [_sketched(one.rows, widths) if is_sketch and not one.is_sketch else one.rows for one in same]
        )
        places = torch.cat([one.places for one in same if one.places is not None])
        # A request that was preempted has computed its tokens again: the latest row counts.
        order = {place: row for row, place in enumerate(places.tolist())}
        at = torch.tensor([order[place] for place in sorted(order)])
        kept = KeptTensor((len(at), width), rows[at], is_sketch, places[at])
        found.append(known.setdefault((kept.shape, is_sketch, fingerprint(kept.rows)), kept))
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
        return super().pair(a.at(b.places), b.at(a.places))
