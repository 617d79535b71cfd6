"""Kept tensors, how far two are apart, and their rows in one layout."""

from __future__ import annotations

import random
from math import inf, nan

import pytest
import torch
from torch import Tensor, nn

from nanwatch.equivalence.differences import (
    KeptTensor,
    Store,
    Tokens,
    by_token,
    gaps,
    module_differences,
    relative_errors,
    side_by_side,
    sketches,
    total,
)


def test_a_sketch_has_the_relative_error_within_a_fifth() -> None:
    """Over all rows, also for rows of very different size, wide and narrow, and errors great and small."""
    draw = random.Random(0)
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        rows, columns, error = draw.randint(16, 64), draw.randint(2, 500), 10 ** draw.uniform(-6, 0)
        a, noise = (torch.randn(rows, columns, generator=generator, dtype=torch.float64) for _ in range(2))
        a *= torch.rand(rows, 1, generator=generator) + 0.1
        b = a + error * noise
        true = float((a - b).norm() / a.norm())
        assert relative_errors(sketches(a), sketches(b)).total == pytest.approx(true, rel=0.2)


def kept(x: Tensor) -> KeptTensor:
    return KeptTensor(tuple(x.shape), x.reshape(-1, x.shape[-1]), is_sketch=False)


def test_the_same_non_finite_number_is_no_error() -> None:
    """One on one side alone is infinitely far, in its row."""
    a = torch.tensor([[1.0, nan], [inf, -inf], [3.0, 4.0]])
    assert relative_errors(a, a.clone()).total == 0.0
    b = a.clone()
    b[0, 1], b[2, 1] = 7.0, 4.4
    errors = relative_errors(a, b)
    assert errors.total == inf
    assert [float(x) for x in errors.rows] == [inf, 0.0, pytest.approx(0.4 / 5, rel=1e-5)]
    assert relative_errors(torch.zeros(1, 2), torch.ones(1, 2)).total == inf


def test_beyond_its_room_a_store_keeps_sketches() -> None:
    """An unchanged tensor is copied once; a copy follows no later write."""
    store = Store(4 * 64)
    x = torch.ones(1, 64)
    first = store.keep(x)
    assert store.keep(x) is first
    x.mul_(2)
    second = store.keep(x)
    assert (first.is_sketch, second.is_sketch) == (False, True)
    assert first.rows.eq(1).all()
    assert torch.equal(second.rows, sketches(x))


def test_only_tokens_that_count_are_compared() -> None:
    """With the batch first, after heads, or flattened; a tensor of other leading sizes is compared whole."""
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    tokens = Tokens(mask)
    x = torch.arange(2 * 3 * 4, dtype=torch.float32)
    wanted = x.reshape(2, 3, 4)[mask.bool()]
    assert torch.equal(tokens.rows(kept(x.reshape(2, 3, 4))), wanted)
    assert torch.equal(tokens.rows(kept(x.reshape(6, 4))), wanted)
    heads = x.reshape(2, 2, 3, 2)[:, :, :, :]
    assert len(tokens.rows(kept(heads.transpose(1, 2).contiguous().transpose(1, 2)[:, :1].contiguous()))) == 3
    assert len(tokens.rows(kept(x.reshape(4, 6)))) == 4
    assert len(Tokens(None).rows(kept(x.reshape(6, 4)))) == 6


def test_rows_are_brought_into_one_layout() -> None:
    """Heads before or after tokens, and one width; other numbers of elements do not go together."""
    x = torch.randn(2, 3, 4, 5)
    a, b = Tokens(None).pair(kept(x), kept(x.transpose(1, 2).contiguous())) or (None, None)
    assert a is not None
    assert b is not None
    assert torch.equal(a, b)
    wide, narrow = Tokens(None).pair(kept(x.reshape(6, 20)), kept(x.reshape(24, 5))) or (None, None)
    assert wide is not None
    assert narrow is not None
    assert torch.equal(wide, narrow)
    assert Tokens(None).pair(kept(x), kept(x[:1])) is None


def test_sums_and_fused_tensors() -> None:
    """`hidden + residual`, and parts next to each other."""
    a, b = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    assert torch.equal(total([kept(a), kept(b)]).rows, (a + b).reshape(-1, 4))
    sketched = KeptTensor((2, 3, 4), sketches(a.reshape(-1, 4)), is_sketch=True)
    whole = total([sketched, kept(b)])
    assert whole.is_sketch
    torch.testing.assert_close(whole.rows, sketches((a + b).reshape(-1, 4)), rtol=1e-4, atol=1e-5)
    beside = side_by_side([kept(a), kept(b)])
    assert beside is not None
    assert torch.equal(beside.rows.reshape(2, 3, 8), torch.cat([a, b], -1))
    assert side_by_side([kept(a), kept(b[:1])]) is None


def test_the_error_of_a_token_is_the_largest_at_its_position() -> None:
    rows = torch.tensor([0.0, 1.0, 2.0, 5.0, 0.5, 0.0])
    assert by_token(rows, (2, 3, 4)).tolist() == [5.0, 1.0, 2.0]  # type: ignore[union-attr]
    assert by_token(rows, (6, 4)) is None


def test_settings_and_weights_apart_are_named() -> None:
    """A weight rounded to 16 bits is no further apart than rounding."""
    a, b = nn.LayerNorm(4, eps=1e-5), nn.LayerNorm(4, eps=1e-6, bias=False)
    assert module_differences(a, b, is_leaf=True) == ["eps is 1e-05 in A and 1e-06 in B", "only A has a bias"]
    one, other = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    other.load_state_dict(one.state_dict())
    assert gaps([one], [other])["weight"] == (0.0, True)
    with torch.no_grad():
        other.weight.copy_(torch.nextafter(one.weight, torch.tensor(inf)))
    gap = gaps([one], [other])["weight"]
    assert gap.is_rounding
    with torch.no_grad():
        other.weight[0, 0] *= 2
    assert not gaps([one], [other])["weight"].is_rounding
