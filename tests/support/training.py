"""Bits of models and trainings compared, and a training step that must fail."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.report.report import NonFiniteError


def loss_of(output: Any) -> Tensor:
    """Its loss, or the mean square of whatever it gives."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    logits = getattr(output, "logits", None)
    return (output.logits_per_image if logits is None else logits).square().mean()


def assert_same_bits(first: Any, second: Any) -> None:
    """Nested values equal to the last bit, nan included."""
    if isinstance(first, Tensor):
        assert first.dtype == second.dtype
        assert torch.equal(
            first.contiguous().view(-1).view(torch.uint8), second.contiguous().view(-1).view(torch.uint8)
        )
    elif isinstance(first, dict):
        assert list(first) == list(second)
        for key in first:
            assert_same_bits(first[key], second[key])
    elif isinstance(first, list | tuple):
        assert len(first) == len(second)
        for left, right in zip(first, second, strict=True):
            assert_same_bits(left, right)
    else:
        assert first == second


def copies(model: nn.Module) -> list[Tensor]:
    """Its parameters as they are now."""
    return [x.detach().clone() for x in model.parameters()]


def are_unchanged(model: nn.Module, before: list[Tensor]) -> bool:
    """Return whether they are the same bits, nan included."""
    return all(
        torch.equal(x.view(torch.int32), y.view(torch.int32))
        for x, y in zip(before, model.parameters(), strict=True)
    )


@contextlib.contextmanager
def stopped(model: nn.Module) -> Iterator[pytest.ExceptionInfo[NonFiniteError]]:
    """Expect a failure inside that leaves the weights as they were."""
    before = copies(model)
    with pytest.raises(NonFiniteError) as error:
        yield error
    assert are_unchanged(model, before)
