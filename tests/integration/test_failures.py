"""Failures that docs/failures.md calls silent, or that look otherwise."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nanwatch.records.note import Note
from nanwatch.report.report import NonFiniteError
from nanwatch.session.api import watch


class SquareNorm(nn.Module):
    """An RMS norm by hand."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def test_an_infinity_that_is_divided_by_stays_silent() -> None:
    """In float16 the mean of squares is inf and the result zero: no tensor of the call is at fault."""
    model = nn.Sequential(SquareNorm())
    with watch(model) as w:
        y = model(torch.full((1, 4), 300.0).half())
    assert y.eq(0).all()
    assert w.report().finding is None


def test_fused_attention_makes_zeros_of_a_masked_row() -> None:
    """F.scaled_dot_product_attention with a row that masks everything is finite, and zero there."""
    x, mask = torch.randn(1, 4, 8), torch.ones(4, 4, dtype=torch.bool)
    mask[1] = False
    y = F.scaled_dot_product_attention(x, x, x, attn_mask=mask)
    assert y.isfinite().all()
    assert y[0, 1].eq(0).all()


class Divergence(nn.Module):
    """KL of two log probabilities."""

    def forward(self, log_p: Tensor, log_q: Tensor) -> Tensor:
        return (log_p.exp() * (log_p - log_q)).sum()


class Distilled(nn.Module):
    """A student of a teacher that is sure."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)
        self.loss = Divergence()

    def forward(self, x: Tensor, teacher: Tensor) -> Tensor:
        return self.loss(teacher.log(), self.head(x).log_softmax(-1))


def test_the_log_of_a_one_hot_target_looks_like_a_mask() -> None:
    """Zeros and -inf with a zero in every row are excused as an input; what is made of them is the finding."""
    torch.manual_seed(0)
    model = Distilled()
    with watch(model), pytest.raises(NonFiniteError) as error:
        model(torch.randn(2, 8), torch.eye(3)[:2])
    report = error.value.report
    assert report.finding is not None
    assert (report.finding.module, report.finding.label, report.finding.value) == ("loss", "output", "nan")
    assert [record.note for record in report.frames[-1].records] == [Note("mask"), None, None]
