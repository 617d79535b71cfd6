"""Re-run of a model with a compiled module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from support.examined import Does, culprit, exponential, look


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_submodule(whole: bool) -> None:
    """A compiled module is run eagerly, and its lines are those of the source."""
    part = Does(exponential)
    if whole:
        model: Any = nn.Sequential(torch.compile(part, backend="eager"))
    else:
        part.compile(backend="eager")
        model = nn.Sequential(part)
    before = dict(part.__dict__)
    _, seen = look(model, torch.ones(2))
    assert (seen.step.operation, str(seen.step.place)) == ("aten.exp.default", culprit(exponential))
    assert part.__dict__ == before
