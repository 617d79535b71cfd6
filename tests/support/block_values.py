"""Values of a whole matrix in a block format, as nanwatch converts them."""

from __future__ import annotations

import torch
from torch import Tensor

from nanwatch.numerics.fit import BLOCKS_BY_NAME, _pieces, converted


def values_in(x: Tensor, name: str) -> Tensor:
    """Return the values of a matrix that whole blocks fill."""
    form, of_all = BLOCKS_BY_NAME[name], x.abs().amax().float()
    return torch.cat([converted(blocks, form, of_all)[0].reshape(-1) for blocks in _pieces(x, form)]).reshape(
        x.shape
    )
