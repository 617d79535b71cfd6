"""Snapshots of the global state that a forward depends on: random number generators and autocast."""

from __future__ import annotations

import random
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class RngState:
    """States of the random number generators that a forward may draw from.

    `torch` is the state of the CPU generator. `cuda` has one for each device once CUDA is in use. Both are torch's
    uint8 tensors. `others` are the states of the modules random and numpy.random, where they were asked for.
    """

    torch: Tensor
    cuda: tuple[Tensor, ...] = ()
    others: tuple[Any, ...] = ()

    @classmethod
    def capture(cls, *, others: bool = False) -> RngState:
        """Return the present states, without CUDA's while a graph is captured, when they cannot be read.

        The others cost 9 µs for Python's generator and 33 µs for numpy's, torch's 1 µs: too much for every batch.
        """
        is_readable = torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing()
        devices = tuple(torch.cuda.get_rng_state_all()) if is_readable else ()
        states: tuple[Any, ...] = ()
        if others:
            numpy = sys.modules.get("numpy.random")
            states = (random.getstate(), None if numpy is None else numpy.get_state())
        return cls(torch.get_rng_state(), devices, states)

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)
        if self.others:
            random.setstate(self.others[0])
            if self.others[1] is not None:
                sys.modules["numpy.random"].set_state(self.others[1])


@dataclass(frozen=True, slots=True)
class Autocast:
    """Autocast for a kind of device: `torch.autocast(device_type, dtype, enabled)`."""

    device_type: str
    dtype: torch.dtype
    enabled: bool

    @classmethod
    def capture(cls) -> tuple[Autocast, ...]:
        """Return the autocast state of the CPU, and of CUDA where torch has it."""
        kinds = ("cpu", "cuda") if torch.backends.cuda.is_built() else ("cpu",)
        return tuple(
            cls(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds
        )

    def context(self) -> AbstractContextManager[Any]:
        """Return a context with this autocast state, without its cache.

        With the cache, the user's own call that is still under way would take a cast made without a graph, which cuts
        its gradients.
        """
        return torch.autocast(self.device_type, self.dtype, self.enabled, cache_enabled=False)
