"""Sentences about two recorded runs: which tokens differ, and how errors grow with depth."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from .comparison import ModuleError
from .packed import STRIDE
from .recorded_run import RecordedRun

# A layer that makes the error this many times as large does more than pass it on.
_JUMP = 10.0
_LAYER = re.compile(r"(?:^|\.)(\d+)$")


def which_tokens(off: Sequence[int], places: Sequence[int], run: RecordedRun) -> str:
    """Return in words what the tokens in the places `off` have in common, among all `places` that were compared."""
    if not off:
        return ""
    prompts = [len(tokens) - count for tokens, count in zip(run.tokens, run.sampled, strict=True)]
    decoded = {one for one in places if one % STRIDE >= prompts[one // STRIDE]}
    # The start of a request that is in no step came from the cache.
    known = {one for one in places if run.steps.get(one, 0) <= run.steps.get(one - one % STRIDE, -1)}
    words = [f"{len(off)} of {len(places)}"] + ["all"] * (len(off) == len(places))
    for said, others in (
        ("in decode", {*places} - decoded),
        ("in prefill", decoded),
        ("in later chunks of a prompt or behind its cached part", decoded | known),
    ):
        if others and others.isdisjoint(off) and len(others) < len(places):
            words.append(f"{said} only")
    first = min(one % STRIDE for one in off)
    if first and any(one % STRIDE == 0 for one in places):
        words.append(f"none before position {first}")
    requests = sorted({one // STRIDE for one in off})
    if len(requests) < len({one // STRIDE for one in places}):
        words.append(f"of request{'s'[: len(requests) - 1]} {', '.join(map(str, requests[:6]))}")
    return ", ".join(words) + f" (the first: request {off[0] // STRIDE}, token {off[0] % STRIDE})"


def growth(modules: Sequence[ModuleError]) -> str:
    """Return in words how the error of the layers grows with depth."""
    layers = [
        (int(found[1]), one.error)
        for one in modules
        if (found := _LAYER.search(one.module_a)) and one.error is not None
    ]
    if len(layers) < 2:
        return ""
    (first, start), (last, end) = layers[0], layers[-1]
    words = f"{start:.2g} after layer {first}, {end:.2g} after layer {last}"
    jump, at = max(((b / a, layer) for (_, a), (layer, b) in pairwise(layers) if a > 0), default=(0.0, 0))
    if jump > _JUMP:
        return f"{words}; layer {at} makes it {jump:.2g} times as large"
    return (
        f"{words}: x {(end / start) ** (1 / (last - first)):.2f} a layer" if start and last > first else words
    )
