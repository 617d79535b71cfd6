"""The state in which a call is made again: random generators, autocast, other wrappers, and the model for itself.

Another thread that called the model during a re-run would be recorded as a part of it, draw from the random states that
the re-run restores, and lose its writes to buffers. So that thread waits for the end of the re-run.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..util.program import each_module
from .slot import ATTRIBUTE, CallWrapper, attach, detach, watching, wrappers

# Seconds after which other threads proceed anyway, so that a re-run cannot deadlock by waiting for a thread.
PATIENCE = 60.0


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


class TemporaryWrapper(CallWrapper):
    """Wrapper of a module's call until the end of a `with` block. Keeps the module alive.

    `run(wrapper, args, kwargs)` makes the call. `run_inner` makes it as if this wrapper were not attached.
    """

    def __init__(self, module: nn.Module, run: Callable[[TemporaryWrapper, Any, Any], Any]) -> None:
        self.module, self._run = module, run
        self.inner: Any = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Make the call."""
        return self._run(self, args, kwargs)

    def run_inner(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call without this wrapper."""
        return (self.module._call_impl if self.inner is None else self.inner)(*args, **kwargs)


@contextmanager
def attached(temporary: Iterable[TemporaryWrapper]) -> Iterator[None]:
    """Attach these wrappers to their modules inside the block."""
    with ExitStack() as after:
        for wrapper in temporary:
            after.callback(detach, wrapper.module, wrapper)
            attach(wrapper.module, wrapper)
        yield


def wrap_calls(modules: Iterable[nn.Module], run: Callable[..., Any]) -> AbstractContextManager[None]:
    """Return a context inside which `run(module, args, kwargs)` makes this thread's calls of these modules.

    They are made after the user's hooks. For use inside `BatchSnapshot.again`, where no watch records and compiled
    modules run eagerly.
    """
    owner = threading.get_ident()

    def run_here(wrapper: TemporaryWrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        is_here = threading.get_ident() == owner
        return run(wrapper.module, args, kwargs) if is_here else wrapper.run_inner(args, kwargs)

    return attached(TemporaryWrapper(module, run_here) for module in {id(x): x for x in modules}.values())


def is_of_thread(owner: int) -> bool:
    """Return whether the caller runs in this thread, or in an autograd thread, which may run this one's backward."""
    return threading.get_ident() == owner or torch._C._current_graph_task_id() != -1


_alone = threading.local()  # `has_ended` is set at the end of the outermost `unwatched` of this thread


def waiting_ends() -> Callable[[], None]:
    """Return a function that ends the wait of other threads for this thread's `unwatched`, from any thread."""
    has_ended = getattr(_alone, "has_ended", None)
    return (lambda: None) if has_ended is None else has_ended.set


@contextmanager
def unwatched(root: nn.Module) -> Iterator[None]:
    """Record no call of a module in the tree inside the block. Other threads that call one wait for its end.

    After PATIENCE seconds no thread waits any more. With nested blocks they wait for the outermost. The watches stay
    attached, so that one that is stopped or paused meanwhile stays so.
    """
    outer = getattr(_alone, "has_ended", None)
    has_ended, owner = outer or threading.Event(), threading.get_ident()

    def run(wrapper: TemporaryWrapper, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_of_thread(owner):
            compiled = wrapper.module.__dict__.get(ATTRIBUTE)
            return (wrapper.module._call_impl if compiled is None else compiled)(*args, **kwargs)
        if not has_ended.wait(PATIENCE):
            has_ended.set()
        return wrapper.run_inner(args, kwargs)

    watched = [module for _, module in each_module(root) if wrappers(module)]
    # Hooks of gradients on weights are in no slot, so their recorders are suspended.
    recorders = {id(x.recorder): x.recorder for module in watched for x in watching(module)}
    with ExitStack() as after:
        if outer is None:
            _alone.has_ended = has_ended
            after.callback(delattr, _alone, "has_ended")
            after.callback(has_ended.set)
        for recorder in recorders.values():
            recorder.suspend(True)
            after.callback(recorder.suspend, False)
        after.enter_context(attached(TemporaryWrapper(module, run) for module in watched))
        yield
