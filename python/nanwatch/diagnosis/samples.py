"""Samples of a batch without which it is finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..precision.casting import replaced
from ..recording.walk import call_leaves
from .batch_snapshot import BatchSnapshot
from .diagnosis import BackwardStart
from .experiment import Allows, nothing_allowed, run

# Runs of a part of the batch. One of 64 samples takes 9.
_MOST_RUNS = 24
# Arguments that say where samples stand in the dataset.
_INDICES = frozenset({"index", "indices", "idx", "ids", "sample_index", "sample_id", "sample_ids"})


def find_samples(
    snapshot: BatchSnapshot,
    names: Mapping[nn.Module, str],
    *,
    allows: Allows = nothing_allowed,
    start: BackwardStart | None = None,
) -> tuple[int, ...]:
    """Return the samples without which the batch is finite, and which are not finite alone; () where none are known.

    `start` is where the backward of the batch failed. Samples are numbered by the first dimension of what the batch was
    called with. Nothing is told where tensors there have different first dimensions, where half of the samples or more
    would be needed, or where a run without them fails, as one does whose samples depend on each other.
    """
    size, num_runs = batch_size(snapshot), 0

    def is_finite(samples: Sequence[int]) -> bool | None:
        """Run these samples alone. Return whether all is finite, None where the run raised or is one too many."""
        nonlocal num_runs
        num_runs += 1
        if num_runs > _MOST_RUNS:
            return None

        def chosen(x: Tensor) -> Tensor | None:
            # Detached: the graph behind it is the user's.
            is_batch = x.ndim > 0 and x.shape[0] == size
            return x.detach()[list(samples)].requires_grad_(x.requires_grad) if is_batch else None

        args, kwargs = replaced((snapshot.args, dict(snapshot.kwargs)), chosen)
        begin = start and start._replace(gradients=replaced(dict(start.gradients), chosen))
        part = replace(snapshot, args=args, kwargs=kwargs)
        experiment = run(part, names, allows=allows, start=begin)
        if experiment.error is not None:
            return None
        return not experiment.bad_labels() and not experiment.has_bad_gradients

    bad: list[int] = []
    rest = list(range(size))
    while 2 * (len(bad) + 1) <= size and num_runs < _MOST_RUNS:
        # Find the shortest beginning that is not finite: its last sample is bad.
        low, high = 0, len(rest)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if is_finite(rest[:middle]) is False else (middle, high)
        bad.append(rest.pop(high - 1))
        if is_finite(rest):
            return tuple(sorted(bad)) if is_finite(bad) is False else ()
    return ()


def batch_size(snapshot: BatchSnapshot) -> int:
    """Return the number of samples; 0 where the tensors of the call do not agree on it."""
    tensors = [x for _, x in call_leaves(snapshot.args, snapshot.kwargs) if isinstance(x, Tensor)]
    if any(x.layout is not torch.strided or x.is_nested for x in tensors):
        return 0
    sizes = {x.shape[0] for x in tensors if x.ndim}
    return sizes.pop() if len(sizes) == 1 else 0


def dataset_indices(snapshot: BatchSnapshot, samples: Sequence[int]) -> str:
    """Return in words where these samples stand in the dataset, when the batch has a tensor that says so; else ""."""
    size = batch_size(snapshot)
    for label, x in call_leaves(snapshot.args, snapshot.kwargs):
        name = label.rpartition("[")[2].rstrip("]").lower()
        if name in _INDICES and isinstance(x, Tensor) and x.shape == (size,) and not x.is_floating_point():
            return f"{label} of these samples is {', '.join(map(str, x[list(samples)].tolist()))}"
    return ""
