"""rehearsal: what a pipeline stage runs to learn shapes is not recorded."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from nanwatch import watch
from nanwatch.instrumentation import slot
from support.toys import mlp


def test_a_rehearsal_is_no_batch() -> None:
    """Its call is unrecorded, and its value comes back; one of what has no module is made all the same."""
    model = mlp()
    rehearse = slot._unrecorded(lambda stage, x: model(x))
    with watch(model) as w:
        for stage in (SimpleNamespace(submod=model), SimpleNamespace()):
            assert rehearse(stage, torch.ones(2, 3)).isfinite().all()
        frames = w.frames
    assert {frame.batch for frame in frames} == {0}  # of the second alone
