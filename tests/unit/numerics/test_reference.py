"""How a large tensor is read in plain torch: in runs of a bounded size, each element once."""

from __future__ import annotations

import pytest
import torch

from nanwatch.numerics import _reference

X = torch.arange(240_000, dtype=torch.float64)
# The second number says whether the runs lie in the tensor's own memory.
VIEWS = {
    "contiguous": (X, True),
    "a matrix": (X.reshape(400, 600), True),
    "transposed": (X.reshape(400, 600).T, True),
    "permuted": (X.reshape(4, 20, 30, 100).permute(2, 0, 3, 1), True),
    "every second": (X[::2], False),
    "columns": (X.reshape(400, 600)[:, :500], False),
    "transposed columns": (X.reshape(400, 600)[:, :500].T, False),
    "with gaps in each dimension": (X.reshape(4, 20, 30, 100)[:, 1::2, :, ::3].permute(2, 0, 3, 1), False),
    "rows longer than a run": (X.reshape(2, 120_000)[:, ::3], False),
    "overlapping": (X.unfold(0, 1000, 500), False),
    "a number": (X[7], True),
    "nothing": (X.reshape(400, 600)[:0].T, True),
}


pytestmark = pytest.mark.parametrize("view", VIEWS)


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of a run grows with the threads."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)


def test_range_and_health_are_those_of_all_runs(view: str) -> None:
    """The ends, and the place in C order of the first bad element, which lies in the last run."""
    x = VIEWS[view][0]
    if x.numel():
        assert _reference.abs_range(x).tolist() == [x.min(), x.max(), 1.0]
        bad = torch.where(x.max() == X, torch.nan, X).as_strided(x.shape, x.stride(), x.storage_offset())
        assert _reference.abs_range(bad)[2] == 0.0
        assert _reference.health(bad)[10] == bad.reshape(-1).isnan().nonzero()[0]
