"""Recordings of runs: one at a time, through JSON, and their first difference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.equivalence.recording import HashedTensor, Recording, first_difference

X = torch.ones(2, 4)


def test_one_recording_at_a_time() -> None:
    """A run inside a run would record the other's calls; the inner one is refused, the outer one goes on."""
    model = nn.Linear(4, 4)
    words = "another nanwatch command follows the calls of all modules already; end that first"

    def step() -> Tensor:
        with pytest.raises(RuntimeError, match=words):
            nanwatch.twice(lambda: model(X))
        return model(X)

    found = nanwatch.twice(step)
    assert found.equal
    assert found.tensors > 3


def hashed(label: str = "output", form: str = "float32 [2]", bits: int = 1, thread: str = "") -> HashedTensor:
    return HashedTensor(0, "output", "fc", "Linear", label, form, bits, thread)


@pytest.mark.parametrize(
    ("a", "b", "label", "equal_before", "other"),
    [
        ([hashed()], [hashed()], None, 0, ""),
        ([hashed(), hashed(bits=2)], [hashed(), hashed(bits=3)], "output", 1, ""),
        ([hashed(), hashed("last")], [hashed()], "last", 1, "nothing"),
        ([hashed()], [hashed(), hashed("last")], "last", 1, "nothing"),
        ([hashed("one")], [hashed("other")], "one", 0, "`other` of fc (Linear)"),
        # Each thread has its own order; the earlier difference counts.
        ([hashed(), hashed(thread="t")], [hashed(thread="t"), hashed()], None, 0, ""),
        ([hashed(bits=2), hashed(thread="t")], [hashed(bits=3)], "output", 0, ""),
    ],
)
def test_the_first_difference_of_two_recordings(
    a: list[HashedTensor], b: list[HashedTensor], label: str | None, equal_before: int, other: str
) -> None:
    found = first_difference(Recording(a), Recording(b))
    if label is None:
        assert found is None
        return
    assert found is not None
    assert (found.label, found.equal_before, found.other) == (label, equal_before, other)


def test_a_recording_comes_back_from_json() -> None:
    """All but the writes, which are of this process alone."""
    recording = Recording(
        [hashed(), hashed("last", bits=2**64 - 1, thread="t")], batches=3, error="KeyError: 'x'"
    )
    recording.writes[7] = "here"
    back = Recording.from_json(recording.to_json())
    assert (back.tensors, back.batches, back.error) == (recording.tensors, 3, "KeyError: 'x'")
    assert back.writes == {}
