"""A gradient that comes to several places and may have changed in between is read at each."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from nanwatch.report.report import NonFiniteError
from support.forks import SIDE, Fork, fork_backward, range_of, ranges
from support.recorders import RECORDERS, WITH_DEVICE, watched


@pytest.mark.parametrize("recorder", RECORDERS)
def test_what_is_not_finite_is_read_at_each_place(recorder: str) -> None:
    """An inf is seen at every place, and is seen to be gone where a write that no version tells of took it out."""
    gradient = torch.randn(SIDE, SIDE)
    gradient[3, 5] = float("inf")
    w, gain = fork_backward(recorder, Fork(), gradient.clone())
    assert [high for _, high in ranges(w).values()] == [float("inf")] * 3
    assert gain["tensors_read"] == 3 + 4
    finding = w.report().finding
    assert finding is not None
    assert (finding.origin, finding.label, finding.index) == ("received", "output.grad", (3, 5))

    def mends(g: Tensor) -> None:
        g.data.nan_to_num_(posinf=1.0)

    w, _ = fork_backward(recorder, Fork(second=mends), gradient.clone())
    found = ranges(w)
    assert found["second"][1] == float("inf")
    assert found["first"] == range_of(gradient.nan_to_num(posinf=1.0))


@pytest.mark.parametrize("recorder", WITH_DEVICE)
def test_a_finite_sum_of_sparse_gradients_is_told_from_one_that_is_not(recorder: str) -> None:
    """Two that are finite and add up to inf stop the step; what is sparse is read at each place."""
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight.detach().clone()
    with watched(model, recorder, gradients=True):
        (model(torch.tensor([1])) * 2e38).sum().backward()
        optimizer.step()
        (model(torch.tensor([1])) * 2e38).sum().backward()
        model.weight.data.copy_(before)
        with pytest.raises(NonFiniteError, match=r"weight\.grad"):
            optimizer.step()
    assert torch.equal(model.weight, before)
