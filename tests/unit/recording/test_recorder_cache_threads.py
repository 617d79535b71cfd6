"""The cache, while another thread writes to what is read, replaces it or ends the watch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.numerics import _extension
from nanwatch.session.api import watch
from support.long_reads import during_the_read, long_to_read
from support.toys import Own, latest

pytestmark = pytest.mark.skipif(_extension.C is None, reason="the Python recorder remembers nothing")
NAN = float("nan")

QUIET: dict[str, Any] = {"on_nonfinite": "record", "rerun": False, "forecast": False}


OTHER = torch.optim.SGD([nn.Parameter(torch.ones(1))])


def write(x: Tensor) -> None:
    """Make the element nan that was read first."""
    with torch.no_grad():
        x[0, 0] = NAN


def write_past_the_counter(x: Tensor) -> None:
    """The same as fused optimizers do it: the step's hook is the only sign."""
    x.data[0, 0] = NAN
    OTHER.step()


@pytest.mark.parametrize("write", [write, write_past_the_counter])
def test_a_weight_written_while_it_is_read_is_read_again(write: Callable[[Tensor], None]) -> None:
    """The range is that of the version before: a later batch, when the weight has its turn, has the nan."""
    OTHER.step()  # the first one takes long
    model = Own()
    model.weight = nn.Parameter(long_to_read(), requires_grad=False)
    with watch(model, **QUIET) as w:
        with during_the_read(model, lambda: write(model.weight)):
            model(torch.ones(1))
        # A weight that does not fit has 1 MiB from each batch in which it waits.
        num_batches = model.weight.numel() * 4 >> 20
        batches = (model(torch.ones(1)) for _ in range(num_batches))
        assert any(latest(w, "weight").isfinite is False for _ in batches)
