"""The tensors that torch.nn.utils.parametrize.cached() keeps: parametrized weights, computed once in such a block.

The block's cache is the process's, and what a call of ours computes without a graph, or in another dtype, is not for
the user's calls to find there; what they have put there may be in the wrong dtype for ours.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.utils import parametrize

# By the id of the module and the name of the weight.
Cache = dict[tuple[int, str], Tensor | None]


def is_on() -> bool:
    """Return whether this is inside such a block."""
    return parametrize._cache_enabled > 0


def kept() -> Cache:
    """What is kept now, to be put in place for another call as `exchange` does."""
    return dict(parametrize._cache) if is_on() else {}


def exchange(cache: Cache) -> Cache:
    """Make this what is kept; what it was until now."""
    before: Cache = parametrize._cache
    parametrize._cache = cache
    return before
