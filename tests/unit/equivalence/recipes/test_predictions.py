"""Predictions behind a loss: the divergence, the standard error, and the calls that are understood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from nanwatch.equivalence.recipes.predictions import Predictions, Seen, differences

CHANCE = torch.Generator().manual_seed(0)
LOGITS = torch.randn(6, 20, 5, generator=CHANCE)
MOVED = LOGITS + 0.1 * torch.randn(6, 20, 5, generator=CHANCE)
LABELS = torch.randint(0, 5, (6, 20), generator=CHANCE)


def seen(loss: Callable[..., Tensor], *args: Any, **options: Any) -> Predictions | None:
    with Seen() as found:
        loss(*args, **options)
    return found.latest


def test_of_classes() -> None:
    """The divergence is torch's, and ignored labels do not count; the classes may stand in the second place."""
    labels = LABELS.clone()
    labels[0] = -100
    options = {"ignore_index": -100}
    by_token = [
        seen(functional.cross_entropy, x.flatten(0, 1), labels.flatten(), **options) for x in (MOVED, LOGITS)
    ]
    in_second = [seen(nn.CrossEntropyLoss(), x.movedim(-1, 1), labels) for x in (MOVED, LOGITS)]
    kept = labels.flatten() != -100
    q, p = (x.flatten(0, 1)[kept].double().log_softmax(-1) for x in (MOVED, LOGITS))
    expected = functional.kl_div(q, p, log_target=True, reduction="batchmean")
    for found in (by_token, in_second):
        error, divergence = differences(*found)
        assert divergence == pytest.approx(float(expected), rel=1e-5)
        assert error is not None
    a, b = (
        functional.cross_entropy(x.flatten(0, 1), labels.flatten(), reduction="none")[kept]
        for x in (MOVED, LOGITS)
    )
    assert by_token[0] is not None
    torch.testing.assert_close(by_token[0].losses - by_token[1].losses, a - b)  # type: ignore[union-attr]


def test_of_values_and_masked_classes() -> None:
    """A squared error has the mean square of the change; a class with the probability 0 changes nothing."""
    found = [seen(functional.mse_loss, x, torch.zeros_like(x)) for x in (MOVED, LOGITS)]
    assert differences(*found)[1] == pytest.approx(float((MOVED - LOGITS).square().mean()), rel=1e-5)
    masked = [torch.cat([x.flatten(0, 1), torch.full((120, 1), -torch.inf)], 1) for x in (MOVED, LOGITS)]
    of_masked, plain = (
        differences(*(seen(functional.cross_entropy, x, LABELS.flatten()) for x in pair))
        for pair in (masked, [x.flatten(0, 1) for x in (MOVED, LOGITS)])
    )
    assert of_masked == pytest.approx(plain)


@pytest.mark.parametrize(
    ("loss", "given", "options"),
    [
        (functional.cross_entropy, (LOGITS.flatten(0, 1), LABELS.flatten()), {"reduction": "sum"}),
        (functional.l1_loss, (LOGITS, MOVED), {}),
        (functional.cross_entropy, (LOGITS[0, 0], LABELS[0, 0]), {}),
    ],
)
def test_losses_without(
    loss: Callable[..., Tensor], given: tuple[Tensor, ...], options: dict[str, Any]
) -> None:
    """Another reduction, another loss and a single token have neither number."""
    found = seen(loss, *given, **options)
    assert found is None
    assert differences(found, found) == (None, None)


@pytest.mark.parametrize("together", [1, 40])
def test_the_error_covers_the_truth(together: int) -> None:
    """Of means of 1,000 tokens 68 % are within one error of the truth, also where 40 neighbours are alike."""
    inside = 0
    for _ in range(200):
        own = torch.randn(4000 // together, generator=CHANCE).repeat_interleave(together)
        run, base = (Predictions(x, torch.zeros(1, 1), False) for x in (own, torch.zeros(4000)))
        error = differences(run, base)[0]
        assert error is not None
        inside += abs(float(own.mean())) <= error
    assert 110 <= inside <= 160
