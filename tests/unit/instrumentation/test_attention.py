"""Attention logits: readings in tiles, and what a watch leaves behind."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from nanwatch.instrumentation.attention import LARGEST, sdpa_logits
from nanwatch.session.api import watch
from support.toys import Does

ORIGINAL = functional.scaled_dot_product_attention


class Attention(nn.Module):
    """Calls attention with what it is given."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, **given)


def twice(inner: nn.Module, after: nn.Module, x: Tensor) -> Tensor:
    """Call attention itself, and a module after it."""
    y = functional.scaled_dot_product_attention(2 * x, x, x)
    return after(inner(y, x, x))


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    assert functional.scaled_dot_product_attention is ORIGINAL


def inputs(q: tuple[int, ...], k: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return seeded queries and keys of these shapes."""
    generator = torch.Generator().manual_seed(sum(q) + sum(k))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in (q, k)]


def logits_of(q: Tensor, k: Tensor, **given: Any) -> Tensor:
    """Return the largest logit of each head, from the whole matrix in float64."""
    q, k = (x.double()[(None,) * (4 - x.ndim)].transpose(0, 4 - x.ndim) for x in (q, k))
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = q @ k.mT * q.shape[-1] ** -0.5
    mask = given.get("attn_mask")
    if mask is not None:
        mask = mask[:, None] if mask.ndim == 3 else mask  # its first dimension is the batch
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype is torch.bool else scores + mask.double()
    if given.get("is_causal"):
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    return scores.amax(dim=(0, 2, 3))


def window(rows: int, columns: int) -> Tensor:
    """Return a boolean mask of a sliding window."""
    return (torch.arange(rows)[:, None] - torch.arange(columns)).abs() < 7


CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 3, 5, 8), (2, 3, 7, 8), {}),
    "causal in tiles": ((2, 2, 530, 8), (2, 2, 530, 8), {"is_causal": True}),
    "grouped, some heads at once": ((1, 12, 200, 8), (1, 4, 300, 8), {"enable_gqa": True, "is_causal": True}),
    "window": ((2, 2, 600, 8), (2, 2, 600, 8), {"attn_mask": window(600, 600)}),
    "additive": ((2, 2, 300, 8), (2, 2, 600, 8), {"attn_mask": inputs((2, 1, 300, 600), (1,))[0] * 5}),
    "broadcast batch": ((4, 2, 9, 8), (1, 2, 9, 8), {}),
    "batch without heads": ((3, 5, 8), (3, 7, 8), {"attn_mask": 5 * inputs((3, 5, 7), (1,))[0]}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_largest_is_that_of_the_matrix(case: str, dtype: torch.dtype) -> None:
    query, key, given = CASES[case]
    q, k = inputs(query, key, dtype)
    expected = logits_of(q, k, **given)
    largest = sdpa_logits("", q, k, None, **given)
    assert torch.allclose(largest.double(), expected, rtol=3e-6, atol=1e-6)


@pytest.mark.usefixtures("each_recorder")
def test_logits_are_rows_of_the_module_that_calls_attention() -> None:
    """In every n-th batch, or of the one around it that is watched; a module called afterwards has none."""
    x, _ = inputs((2, 2, 5, 8), (1,))
    model = Does(twice, Does(lambda attention, *x: attention(*x), Attention()), nn.Identity())
    with watch(model, attention=2, ignore_modules="parts.0.parts.0") as w:
        for _ in range(2):
            model(x)
        rows = {
            (frame.batch, frame.name): {r.label: r for r in frame.records if r.label == LARGEST}
            for frame in w.frames
        }
    names = ("parts.0", "parts.1", "")
    assert [*rows] == [(batch, name) for batch in (0, 1) for name in names]
    assert [key for key, found in rows.items() if found] == [(0, "parts.0"), (0, "")]
    largest = rows[0, ""][LARGEST]
    assert largest.abs_max == pytest.approx(logits_of(2 * x, x).max().item(), rel=1e-6)
    assert (largest.role, largest.shape, largest.dtype) == ("output", (2,), "float32")


def test_softmax_of_attention_is_read_and_other_softmax_is_not() -> None:
    """nn.MultiheadAttention that returns its weights calls softmax on its logits; a router's softmax has none."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Softmax(dim=-1), nn.MultiheadAttention(8, 2, batch_first=True))
    model.forward = lambda x: model[2](x, model[1](model[0](x)), x)[1]  # type: ignore[method-assign]
    x = torch.randn(2, 5, 8)
    with watch(model, attention=True) as w:
        model(x)
        found = w.attention
    own = model[2]
    q, k, _ = functional.linear(x, own.in_proj_weight, own.in_proj_bias).chunk(3, dim=-1)
    k = functional.linear(model[1](model[0](x)), own.in_proj_weight, own.in_proj_bias).chunk(3, dim=-1)[1]
    split = [y.view(2, 5, 2, 4).transpose(1, 2) for y in (q, k)]
    assert list(found) == ["2"]
    assert found["2"].largest == pytest.approx([logits_of(*split).max().item()], rel=1e-5)


def test_functions_come_back_after_the_last_watch_and_other_patches_stay(monkeypatch):
    """Watches stop in any order. A function that another library put over ours stays, and still works."""
    softmax, models, x = functional.softmax, [Attention(), Attention()], inputs((1, 2, 5, 8), (1,))[0]
    first, second = (watch(model, attention=True) for model in models)
    first.stop()
    ours = functional.scaled_dot_product_attention
    assert ours is not ORIGINAL
    with monkeypatch.context() as patched:
        theirs = partial(ours)
        patched.setattr(functional, "scaled_dot_product_attention", theirs)
        second.stop()
        assert functional.scaled_dot_product_attention is theirs
        assert torch.equal(theirs(x, x, x), ORIGINAL(x, x, x))
        with watch(models[0], attention=True) as third:
            models[0](x, x, x)
            assert len(third.attention) == 1
            labels = [record.label for frame in third.frames for record in frame.records]
            assert labels.count(LARGEST) == 1
        assert functional.scaled_dot_product_attention is theirs
    functional.scaled_dot_product_attention = ORIGINAL
    assert functional.softmax is softmax
