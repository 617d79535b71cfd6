"""Gap between the log-probabilities that a trainer and an engine give to the sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, groupby

import torch
from torch import Tensor

from .packed import STRIDE
from .recorded_run import RecordedRun


@dataclass(frozen=True, slots=True)
class ProbabilityGap:
    """Difference of log-probabilities in nats, the trainer's minus the engine's, over `tokens` sampled tokens.

    `mean` and `largest` are of magnitudes. `kl` is KL(engine || trainer) per token: over the whole vocabulary where
    both have logits (`is_exact`), else estimated from the sampled tokens. `effective` is the effective sample size of
    the importance weights, as a share of the tokens, and `effective_sequences` that of whole answers. `worst` is the
    request and the position of the largest difference.
    """

    tokens: int
    mean: float
    largest: float
    kl: float
    is_exact: bool
    effective: float
    effective_sequences: float
    worst: tuple[int, int]

    def __str__(self) -> str:
        way = "" if self.is_exact else ", estimated"
        return (
            f"{self.tokens} sampled tokens, |difference| {self.mean:.2g} in the mean and {self.largest:.2g} at most"
            f" (request {self.worst[0]}, token {self.worst[1]}); KL {self.kl:.2g} per token{way}; effective sample size"
            f" of the importance weights {self.effective:.1%} by token, {self.effective_sequences:.1%} by answer"
        )


def probability_gap(
    trainer: Sequence[Sequence[float]], engine: Sequence[Sequence[float]]
) -> ProbabilityGap | None:
    """Return the gap between log-probabilities by request and sampled token, or None without any token.

    `worst` counts from the first sampled token. The estimate of KL from samples is the mean of `w - 1 - log w`
    (Schulman, "Approximating KL Divergence", 2020), where w is the trainer's probability over the engine's. The
    effective sample size is `(sum w)**2 / sum w**2` (Kong, "A note on importance sampling", 1992).
    """
    pairs = zip(trainer, engine, strict=True)
    apart = [torch.tensor(a, dtype=torch.float64) - torch.tensor(b, dtype=torch.float64) for a, b in pairs]
    flat = torch.cat([*apart, torch.empty(0, dtype=torch.float64)])
    if not len(flat):
        return None
    largest, *worst = max((abs(x), i, at) for i, row in enumerate(apart) for at, x in enumerate(row.tolist()))
    return ProbabilityGap(
        tokens=len(flat),
        mean=float(flat.abs().mean()),
        largest=largest,
        kl=max(float((flat.clamp(max=700.0).expm1() - flat).mean()), 0.0),
        is_exact=False,
        effective=effective_share(flat),
        effective_sequences=effective_share(torch.stack([row.sum() for row in apart if len(row)])),
        worst=(worst[0], worst[1]),
    )


def effective_share(log_weights: Tensor) -> float:
    """Return the effective sample size of weights, given by their logarithms, as a share of their number."""
    weights = (log_weights - log_weights.max()).exp()
    return float(weights.sum() ** 2 / (len(weights) * weights.square().sum()))


def divergence(trainer: Tensor, engine: Tensor) -> float:
    """Return KL(engine || trainer) in nats, in the mean over the rows of log-probabilities (tokens, words)."""
    return max(float((engine.exp() * (engine - trainer).nan_to_num(0.0)).sum(-1).mean()), 0.0)


def run_gap(a: RecordedRun, b: RecordedRun) -> tuple[ProbabilityGap, float] | None:
    """Return the gap of A to what B reports, and how far B's logits are from that; None without a token of both."""
    ours, theirs = (dict(zip(run.sampled_places, chain(*run.logprobs), strict=False)) for run in (a, b))
    logs_a, logs_b = _log_softmax(a), _log_softmax(b)
    token = {place: b.tokens[place // STRIDE][place % STRIDE + 1] for place in theirs}
    ours |= {place: float(logs_a[place][token[place]]) for place in token if place in logs_a}
    places = [place for place in theirs if place in ours and _have_same_tokens(a, b, place)]
    by_request = [list(group) for _, group in groupby(places, key=lambda place: place // STRIDE)]
    gap = probability_gap(*([[log[one] for one in row] for row in by_request] for log in (ours, theirs)))
    if gap is None:
        return None
    if all(one in logs_a and one in logs_b for one in places):
        both = (torch.stack([log[one] for one in places]) for log in (logs_a, logs_b))
        gap = replace(gap, kl=divergence(*both), is_exact=True)
    off = (abs(theirs[one] - float(logs_b[one][token[one]])) for one in places if one in logs_b)
    worst = by_request[gap.worst[0]][gap.worst[1]]
    return replace(gap, worst=(worst // STRIDE, worst % STRIDE + 1)), max(off, default=0.0)


def _log_softmax(run: RecordedRun) -> dict[int, Tensor]:
    """Return the log-probabilities of all words by place; nothing where logits were kept as sketches."""
    kept = next(iter(run.calls[0].outputs), None)
    if kept is None or kept.is_sketch or kept.places is None:
        return {}
    return dict(zip(kept.places.tolist(), kept.rows.double().log_softmax(-1), strict=True))


def _have_same_tokens(a: RecordedRun, b: RecordedRun, place: int) -> bool:
    request, end = place // STRIDE, place % STRIDE + 2
    return a.tokens[request][:end] == b.tokens[request][:end]
