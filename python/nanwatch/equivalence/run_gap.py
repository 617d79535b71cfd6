"""Gap of the log-probabilities of two recorded runs."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, groupby

import torch
from torch import Tensor

from .packed import STRIDE
from .probability_gap import ProbabilityGap, probability_gap
from .recorded_run import RecordedRun


def run_gap(a: RecordedRun, b: RecordedRun) -> tuple[ProbabilityGap, float] | None:
    """Return the gap of A to what B reports, and how far B's logits are from that; None without a token of both."""
    reported_a, reported = (
        dict(zip(run.sampled_places, chain(*run.logprobs), strict=False)) for run in (a, b)
    )
    logs_a, logs = _log_softmax(a), _log_softmax(b)
    token = {place: b.tokens[place // STRIDE][place % STRIDE + 1] for place in reported}
    ours = {place: float(row[token[place]]) for place, row in logs_a.items() if place in token} or reported_a
    places = [place for place in reported if place in ours and _have_same_tokens(a, b, place)]
    by_request = [list(group) for _, group in groupby(places, key=lambda place: place // STRIDE)]
    values_a, values = ([[log[one] for one in row] for row in by_request] for log in (ours, reported))
    is_whole = bool(places) and all(one in logs_a and one in logs for one in places)
    both = [torch.stack([log[one] for one in places]) for log in (logs_a, logs)] if is_whole else None
    gap = probability_gap(values_a, values, [row[0] % STRIDE + 1 for row in by_request], both)
    if gap is None:
        return None
    off = max(
        (abs(reported[one] - float(logs[one][token[one]])) for one in places if one in logs), default=0.0
    )
    return replace(gap, worst=(by_request[gap.worst[0]][0] // STRIDE, gap.worst[1])), off


def _log_softmax(run: RecordedRun) -> dict[int, Tensor]:
    """Return the log-probabilities of all words by place; nothing where logits were kept as sketches."""
    kept = next(iter(run.calls[0].outputs), None)
    if kept is None or kept.is_sketch or kept.places is None:
        return {}
    return dict(zip(kept.places.tolist(), kept.rows.double().log_softmax(-1), strict=True))


def _have_same_tokens(a: RecordedRun, b: RecordedRun, place: int) -> bool:
    request, end = place // STRIDE, place % STRIDE + 2
    return a.tokens[request][:end] == b.tokens[request][:end]
