"""The place of a non-finite frame in its batch, counted by both recorders, also where the ring dropped frames."""

from __future__ import annotations

import pytest
import torch

import nanwatch
from nanwatch import Finding
from nanwatch.session.watch import Watch


class Poison(torch.nn.Module):
    """Passes its input on, and spoils the one of the call with this number."""

    def __init__(self) -> None:
        super().__init__()
        self.at, self.calls = -1, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x * float("nan") if self.calls - 1 == self.at else x + 1


def chain(length: int) -> torch.nn.Sequential:
    return torch.nn.Sequential(*(Poison() for _ in range(length)))


def finding_of(watch: Watch) -> Finding:
    finding = watch.report().finding
    assert finding is not None
    return finding


@pytest.mark.usefixtures("each_recorder")
@pytest.mark.parametrize(
    ("max_frames", "place", "batches"), [(1, 0, 0), (3, 4, 3), (3, 29, 20), (100, 4, 20)]
)
def test_the_place_counts_what_the_ring_has_dropped(max_frames: int, place: int, batches: int) -> None:
    """The place is the number of calls that ended before in the batch, for any size of the ring and in any batch."""
    model = chain(30)
    with nanwatch.watch(model, on_nonfinite="record", rerun=False, max_frames=max_frames) as watch:
        for _ in range(batches):
            model(torch.ones(2))
        model[place].at = batches
        model(torch.ones(2))
        finding = finding_of(watch)
    assert (finding.batch, finding.module, finding.sequence) == (batches, str(place), place)


@pytest.mark.usefixtures("each_recorder")
def test_the_state_of_an_optimizer_comes_last() -> None:
    """A frame of its step counts on from those of forward and backward."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with nanwatch.watch(
        model, optimizer=optimizer, on_nonfinite="record", rerun=False, max_frames=2
    ) as watch:
        for batch in range(2):
            model(torch.ones(1, 2)).sum().backward()
            if batch == 1:
                optimizer.state[model[0].weight]["momentum_buffer"][0, 0] = float("inf")
            optimizer.step()
        finding = finding_of(watch)
    # Two layers and the root.
    assert (finding.batch, finding.origin, finding.sequence) == (1, "buffer", 3)
