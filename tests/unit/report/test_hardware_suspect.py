"""A suspect of hardware in one sentence."""

from __future__ import annotations

from nanwatch.report.hardware_suspect import HardwareSuspect
from nanwatch.report.replica import Distance


def test_the_sentence_names_host_device_and_bits() -> None:
    """And the call."""
    distance = Distance(12, 1, 128, 0.25, (20,))
    told = str(HardwareSuspect(12, "0.fc", "Linear", 3, "node-7", "cuda:1 (H200)", distance))
    for words in ("0.fc (Linear) in batch 12", "rank 3", "node-7", "cuda:1 (H200)", "1 of 128", "bit 20"):
        assert words in told
    assert "step" not in told
