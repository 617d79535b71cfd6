"""Sentences about two recorded runs: which tokens differ, how errors grow with depth, which settings are not alike."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from .comparison import ModuleError
from .packed import STRIDE
from .recorded_run import RecordedRun

# Names of settings that say nothing of numbers.
_QUIET = (
    "transformers_version",
    "_name_or_path",
    "dtype_of_config",
    "torch_dtype",
    "architectures",
    "use_cache",
)
# A layer that makes the error this many times as large does more than pass it on.
_JUMP = 10.0
_LAYER = re.compile(r"(?:^|\.)(\d+)$")


def which_tokens(off: Sequence[int], places: Sequence[int], run: RecordedRun) -> str:
    """Return in words what the tokens in the places `off` have in common, among all `places` that were compared."""
    if not off:
        return ""
    asked = {
        r: len(tokens) - count for r, (tokens, count) in enumerate(zip(run.tokens, run.sampled, strict=True))
    }

    def kinds(of: Sequence[int]) -> list[set[int]]:
        prefill = {one for one in of if one % STRIDE < asked.get(one // STRIDE, 0)}
        first = {one for one in of if one % STRIDE == 0}
        later = {one for one in prefill if run.steps.get(one, 0) > run.steps.get(one - one % STRIDE, 0)}
        return [prefill, set(of) - prefill, first, later]

    (bad_prefill, bad_decode, bad_first, bad_later), (prefill, decode, first, later) = (
        kinds(off),
        kinds(places),
    )
    words = [f"{len(off)} of {len(places)}"]
    if len(off) == len(places):
        words.append("all")
    elif not bad_prefill and decode:
        words.append("in decode only")
    elif not bad_decode and decode:
        words.append("in prefill only")
    if bad_later == set(off) and bad_prefill == bad_later and later < prefill:
        words.append("in chunks of a prompt after its first only")
    if not bad_first and first and len(off) < len(places):
        words.append(f"none before position {min(one % STRIDE for one in off)}")
    requests = sorted({one // STRIDE for one in off})
    if len(requests) < len({one // STRIDE for one in places}):
        words.append(f"of request{'' if len(requests) == 1 else 's'} {', '.join(map(str, requests[:6]))}")
    worst_at = off[0]
    return ", ".join(words) + f" (the first: request {worst_at // STRIDE}, token {worst_at % STRIDE})"


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
    steps = [(b / a, layer) for (_, a), (layer, b) in pairwise(layers) if a > 0 and b > 0]
    if not steps or last == first:
        return words
    jump, at = max(steps)
    if jump > _JUMP:
        return f"{words}; layer {at} makes it {jump:.2g} times as large"
    return f"{words}: x {(end / start) ** (1 / (last - first)):.2f} a layer"


def settings_apart(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return in words the settings that both runs have and have not alike."""
    names = [name for name in a if name in b and a[name] != b[name] and name not in _QUIET]
    return [f"{name} is {a[name]} in A and {b[name]} in B" for name in names]
