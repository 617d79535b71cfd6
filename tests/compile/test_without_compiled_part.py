"""torch.compile without the compiled part of nanwatch: compiled code is not watched, and the user is told."""

from __future__ import annotations

import pytest

from support.processes import environment, forked

_PROGRAM = """
import torch, nanwatch
from torch import nn
model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh()))
with nanwatch.watch(model) as watch:
    torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 2)).sum().backward()
    model[1](torch.ones(2))
print([frame.name for frame in watch.frames])
"""


@pytest.mark.slow
def test_compiled_code_is_not_watched_and_the_user_is_told() -> None:
    """One warning with the reason; the graph is whole, and calls in the interpreter are recorded."""
    done = forked("-c", _PROGRAM, env=environment(NANWATCH_EXT="0"), imported=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['1.0', '1']"
    assert done.stderr.count("calls inside torch.compile need the compiled part") == 1
