"""Gap between the log-probabilities that a trainer and an engine give to the sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, expm1, fsum

from torch import Tensor


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
    trainer: Sequence[Sequence[float]],
    engine: Sequence[Sequence[float]],
    firsts: Sequence[int] | None = None,
    logits: Sequence[Tensor] | None = None,
) -> ProbabilityGap | None:
    """Return the gap between log-probabilities by request and sampled token, or None without any token.

    `firsts` are the positions of the first sampled token of each request. `logits` are those of the trainer and of the
    engine at the same places, of shape (tokens, words).

    The estimate of KL from samples is the mean of `w - 1 - log w` (Schulman, "Approximating KL Divergence", 2020),
    where w is the trainer's probability over the engine's. The effective sample size is `(sum w)**2 / sum w**2` (Kong,
    "A note on importance sampling", 1992).
    """
    apart = [
        [one - other for one, other in zip(ours, theirs, strict=True)]
        for ours, theirs in zip(trainer, engine, strict=True)
    ]
    flat = [one for request in apart for one in request]
    if not flat:
        return None
    sizes = [
        (abs(one), request, (firsts[request] if firsts else 0) + i)
        for request, row in enumerate(apart)
        for i, one in enumerate(row)
    ]
    largest, *worst = max(sizes)
    if logits is None:
        kl = fsum(expm1(min(one, 700.0)) - one for one in flat) / len(flat)
    else:
        ours, theirs = (one.double().log_softmax(-1) for one in logits)
        kl = float((theirs.exp() * (theirs - ours).nan_to_num(0.0)).sum(-1).mean())
    answers = [fsum(request) for request in apart if request]
    return ProbabilityGap(
        tokens=len(flat),
        mean=fsum(map(abs, flat)) / len(flat),
        largest=largest,
        kl=max(kl, 0.0),
        is_exact=logits is not None,
        effective=effective_share(flat),
        effective_sequences=effective_share(answers),
        worst=(worst[0], worst[1]),
    )


def effective_share(log_weights: Sequence[float]) -> float:
    """Return the effective sample size of weights, given by their logarithms, as a share of their number."""
    top = max(log_weights)
    weights = [exp(one - top) for one in log_weights]
    return fsum(weights) ** 2 / (len(weights) * fsum(one * one for one in weights))
