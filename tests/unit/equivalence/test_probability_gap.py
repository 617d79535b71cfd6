"""Gap of log-probabilities, against the definitions over whole distributions."""

from __future__ import annotations

import math

import pytest
import torch

from nanwatch.equivalence.probability_gap import divergence, effective_share, probability_gap


def test_equal_probabilities_have_no_gap() -> None:
    """All weights are 1, so each token counts."""
    found = probability_gap([[-1.0, -2.0], [-3.0]], [[-1.0, -2.0], [-3.0]])
    assert found is not None
    assert (found.tokens, found.mean, found.largest, found.kl, found.effective) == (3, 0.0, 0.0, 0.0, 1.0)


def test_the_worst_token_is_named_by_request_and_position() -> None:
    """The position counts from the first sampled token."""
    found = probability_gap([[-1.0, -2.0], [-3.0, -1.0]], [[-1.0, -2.1], [-3.0, -1.5]])
    assert found is not None
    assert (found.worst, found.largest) == ((1, 1), 0.5)
    assert found.mean == pytest.approx(0.15)


def test_the_exact_divergence_is_that_of_torch() -> None:
    """KL(engine || trainer), in the mean over tokens."""
    torch.manual_seed(0)
    p, q = (torch.randn(5, 7).double().log_softmax(-1) for _ in range(2))
    expected = torch.nn.functional.kl_div(q, p, log_target=True, reduction="batchmean")
    assert divergence(q, p) == pytest.approx(float(expected))


def test_the_estimate_is_the_divergence_in_the_mean_over_samples() -> None:
    """Over 40,000 samples of the engine's distribution, within 5 %."""
    torch.manual_seed(0)
    p, q = (torch.randn(6).double().log_softmax(-1) for _ in range(2))
    samples = torch.multinomial(p.exp(), 40_000, replacement=True)
    found = probability_gap([q[samples].tolist()], [p[samples].tolist()])
    assert found is not None
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum()), rel=0.05)


def test_one_weight_above_all_others_is_one_sample() -> None:
    """And equal weights of any size are all of them."""
    assert effective_share(torch.tensor([50.0, 0.0, 0.0, 0.0])) == pytest.approx(0.25)
    assert effective_share(torch.tensor([-800.0, -800.0])) == pytest.approx(1.0)
    assert effective_share(torch.tensor([0.0, math.log(3)])) == pytest.approx(16 / 20)
    assert probability_gap([[]], [[]]) is None
