from __future__ import annotations

import pytest
import torch

from support.implementations import Implementation
from support.oracle import DTYPES, random_patterns, same


def test_equals_one_by_one(implementation: Implementation) -> None:
    """Many tensors of every dtype and of sizes from empty to above a block give what `abs_range` gives each."""
    tensors = [
        implementation.place(random_patterns(dtype, (numel,), seed=numel))
        for numel in (0, 1, 33, 5000, 200_000)
        for dtype in DTYPES
    ]
    for together, alone in zip(
        implementation.abs_ranges(tensors), map(implementation.abs_range, tensors), strict=True
    ):
        assert same(together, alone)


def test_mixed_layouts_keep_their_order(implementation: Implementation) -> None:
    """Sparse, complex and subclassed tensors between plain ones stay in their places."""

    class Named(torch.Tensor):
        pass

    tensors = [
        torch.tensor([5.0]),
        torch.tensor([[0.0, 4.0]]).to_sparse(),
        torch.tensor([3.0]).as_subclass(Named),
        torch.tensor([3 + 4j]),
        torch.tensor([2], dtype=torch.uint16),
    ]
    got = implementation.abs_ranges([implementation.place(x) for x in tensors])
    assert got == [(5, 5, True), (0, 4, True), (3, 3, True), (5, 5, True), (2, 2, True)]


def test_errors_name_the_position(implementation: Implementation) -> None:
    """The tensor at fault is named by its position; a tensor in place of a list gets a hint."""
    good = torch.ones(1)
    with pytest.raises(TypeError, match=r"tensor 1, takes a torch.Tensor, got NoneType"):
        implementation.abs_ranges([good, None])
    with pytest.raises(TypeError, match=r"tensor 2, cannot read.*meta tensor, no data"):
        implementation.abs_ranges([good, good, torch.ones(1, device="meta")])
    with pytest.raises(TypeError, match=r"iterable of tensors, got torch.Tensor.*abs_range for one tensor"):
        implementation.abs_ranges(good)
    with pytest.raises(TypeError, match="iterable of tensors, got int"):
        implementation.abs_ranges(3)
