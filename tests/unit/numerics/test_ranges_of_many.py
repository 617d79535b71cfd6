from __future__ import annotations

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
