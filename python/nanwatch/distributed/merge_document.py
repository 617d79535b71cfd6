"""A merge as one JSON document, for programs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..report.report import plain
from .merge import Merged

SCHEMA = "nanwatch.merged"
VERSION = 1

# Up to so many ranks a document holds what each of them said. Above it holds the summaries, which grow with the model
# and hardly with the job.
MOST_RANKS = 256
_RANGES = 16  # of a weight that differs


def document(merged: Merged) -> dict[str, Any]:
    """The whole for programs; nan and the infinities are spelt as strings, as in a report.

    `headroom_bits` and `weights` are null where there are more than 256 ranks, and `findings` and `origins` are the
    first 256; `num_failed` and `origin_ranks` are of all. `other_attempts` has a document of each.
    """
    modules, weights = merged.modules(), merged.weights()
    is_whole = len(merged.digests) <= MOST_RANKS
    failed, origins = merged.failed, merged.origins
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "attempt": plain(merged.attempt),
        "ranks": merged.ranks,
        "num_failed": len(failed),
        "origin_ranks": [one.rank for one in origins],
        "origins": [plain(one.finding) for one in origins[:MOST_RANKS]],
        "findings": [plain(one.finding) for one in failed[:MOST_RANKS]],
        "headroom": [plain(merged.summary(name)) for name in modules],
        "headroom_bits": {name: [plain(bits) for bits in merged.column(name)] for name in modules}
        if is_whole
        else None,
        "differences": [
            {**plain(replace(one, ranges=one.ranges[:_RANGES])), "num_ranges": len(one.ranges)}
            for one in weights
            if len(one.ranges) > 1
        ],
        "weights": [plain(one) for one in weights] if is_whole else None,
        "other_attempts": [document(one) for one in merged.others],
        "left_out": list(merged.left_out),
    }
