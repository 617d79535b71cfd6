"""job: which process of how many this is."""

from __future__ import annotations

import pytest
import torch

from nanwatch.util.job import rank_and_world_size


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4)),
        ({"RANK": "first", "WORLD_SIZE": "4"}, (0, 1)),
    ],
)
def test_before_the_job_has_begun(
    given: dict[str, str], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank and size are those in the environment of torchrun, if it is complete."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert rank_and_world_size() == expected


def test_the_jobs_own_word_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once torch.distributed has begun, it is asked."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert rank_and_world_size() == (0, 1)
    finally:
        torch.distributed.destroy_process_group()
    assert rank_and_world_size() == (3, 4)
