"""Samples of a batch that carry its failure: without them the batch is finite, and with them alone it fails again.

Which samples these may be is seen without a run where the bad tensor has the batch's dimension: its rows that are not
finite. Otherwise the batch is halved. Either way, two runs prove the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil, log2

import torch
from torch import Tensor, nn

from ..precision.casting import replaced
from ..recording.walk import call_leaves
from ..util.modules import each_module
from .batch_snapshot import BatchSnapshot
from .diagnosis import BadRows
from .experiment import Allows, BackwardStart, nothing_allowed, run

# Runs that prove the answer: one without the samples and one with them alone.
_PROOF = 2
_INDICES = frozenset({"index", "indices", "idx", "ids", "sample_index", "sample_id", "sample_ids"})


def find_samples(
    snapshot: BatchSnapshot,
    names: Mapping[nn.Module, str],
    seen: Iterable[BadRows],
    most_runs: int,
    *,
    allows: Allows = nothing_allowed,
    start: BackwardStart | None = None,
) -> tuple[int, ...]:
    """Return the fewest samples that carry the failure, in at most so many runs; () where none are known to.

    `seen` are the bad rows of tensors of the failed run, `start` is where its backward failed. Samples are numbered by
    the first dimension of what the batch was called with. Nothing is told where tensors there have different first
    dimensions, where more than half of the samples would be needed, or where a run without them fails, as one does
    whose samples depend on each other.
    """
    size = batch_size(snapshot)
    if size < 2 or most_runs < _PROOF:
        return ()
    search = _Search(snapshot, names, size, allows, start)
    known = min(_candidates(seen, size), key=len, default=())
    if known:
        found = known if search.is_finite_without(known) else ()
    else:
        found = search.halve() if most_runs >= ceil(log2(size)) + _PROOF else ()
    return found if found and search.fails_alone(found) else ()


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


class _Search:
    def __init__(
        self,
        snapshot: BatchSnapshot,
        names: Mapping[nn.Module, str],
        size: int,
        allows: Allows,
        start: BackwardStart | None,
    ) -> None:
        self._snapshot = snapshot
        self._names = names
        self._size = size
        self._allows = allows
        self._start = start

    def is_finite_without(self, samples: Sequence[int]) -> bool:
        """Return whether the batch is finite without these."""
        left_out = set(samples)
        return self._run([i for i in range(self._size) if i not in left_out]) is True

    def fails_alone(self, samples: Sequence[int]) -> bool:
        """Return whether the batch of these alone fails, too."""
        return self._run(samples) is False

    def halve(self) -> tuple[int, ...]:
        """Return the one sample without which the batch is finite; () where one is not enough."""
        suspects = range(self._size)
        is_proven = False
        while len(suspects) > 1:
            middle = len(suspects) // 2
            is_proven = self.is_finite_without(suspects[:middle])
            suspects = suspects[:middle] if is_proven else suspects[middle:]
        found = tuple(suspects)
        return found if is_proven or self.is_finite_without(found) else ()

    def _run(self, samples: Sequence[int]) -> bool | None:
        """Run these samples alone. Return whether all is finite, None where the run raised."""

        def chosen(x: Tensor) -> Tensor | None:
            # Detached: the graph behind it is the user's.
            is_batch = x.ndim > 0 and x.shape[0] == self._size
            return x.detach()[list(samples)].requires_grad_(x.requires_grad) if is_batch else None

        args, kwargs = replaced((self._snapshot.args, dict(self._snapshot.kwargs)), chosen)
        start = self._start
        if start is not None:
            start = start._replace(gradients=replaced(dict(start.gradients), chosen))
        snapshot = replace(self._snapshot, args=args, kwargs=kwargs)
        with _attributes_kept(snapshot.module):
            experiment = run(snapshot, self._names, allows=self._allows, backward=snapshot.grad, start=start)
        if experiment.error is not None:
            return None
        return not any(experiment.nonfinite()) and not experiment.bad_gradients


@contextmanager
def _attributes_kept(root: nn.Module) -> Iterator[None]:
    """Put back the attributes that a run replaces: a state kept for fewer samples would not fit the next batch."""
    before = [(module.__dict__, dict(module.__dict__)) for _, module in each_module(root)]
    try:
        yield
    finally:
        for now, own in before:
            for name in now.keys() - own.keys():
                del now[name]
            now.update((name, value) for name, value in own.items() if now.get(name) is not value)


def _candidates(seen: Iterable[BadRows], size: int) -> Iterator[tuple[int, ...]]:
    """Yield sets of samples that the bad rows of a tensor belong to, each of at most half of the batch."""
    for one in seen:
        # Batch and time, or batch and heads, are often flattened into the first dimension.
        matching = [
            (length // size, rows)
            for dim, (length, rows) in enumerate(one)
            if length == size or (dim == 0 and length % size == 0)
        ]
        for per_sample, rows in matching[:1]:
            samples = tuple(sorted({row // per_sample for row in rows}))
            if 0 < 2 * len(samples) <= size:
                yield samples
