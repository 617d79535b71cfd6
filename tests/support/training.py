"""The loss of any output, and bits of models and trainings compared."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten


def loss_of(output: Any) -> Tensor:
    """Its loss, or the mean square of whatever it gives."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    logits = getattr(output, "logits", None)
    return (output.logits_per_image if logits is None else logits).square().mean()


def assert_same_bits(first: Any, second: Any) -> None:
    """Nested values equal to the last bit, nan included."""
    (values, form), (others, other_form) = tree_flatten(first), tree_flatten(second)
    assert form == other_form
    for x, y in zip(values, others, strict=True):
        if isinstance(x, Tensor):
            assert (x.dtype, x.shape) == (y.dtype, y.shape)
            x, y = (tensor.contiguous().view(-1).view(torch.uint8) for tensor in (x, y))
        assert torch.equal(x, y) if isinstance(x, Tensor) else x == y
