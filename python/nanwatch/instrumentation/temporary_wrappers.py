"""Temporary wrappers before the calls of some modules, and exclusive access to a model during a re-run.

Another thread that called the model during a re-run would be recorded as a part of it, draw from the random states that
the re-run restores, and lose its writes to buffers. So that thread waits for the end of the re-run.
"""

from __future__ import annotations

import functools
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from ..util.imports import when_imported
from ..util.modules import each_module
from ..util.user_warning import warn_user
from .slot import CallWrapper, attach, detach, own_call, wrappers

# Function that makes the call of a module, as `module._call_impl(*args, **kwargs)` would.
Run = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], Any]

# Seconds after which other threads proceed anyway, so that a re-run that waits for one of them cannot deadlock.
PATIENCE = 60.0


class TemporaryWrapper(CallWrapper):
    """Wrapper before a module's call until the end of a `with` block. Keeps the module alive."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.inner: Any = None

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Make the call through `run`."""
        return self.run(self._module, args, kwargs)

    @abstractmethod
    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the module's call."""

    def run_inner(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call as if this wrapper were not attached."""
        return (module._call_impl if self.inner is None else self.inner)(*args, **kwargs)


@contextmanager
def attached(temporary: Iterable[TemporaryWrapper]) -> Iterator[None]:
    """Attach these wrappers to their modules inside the block."""
    found: list[TemporaryWrapper] = []
    try:
        for wrapper in temporary:
            found.append(wrapper)
            attach(wrapper._module, wrapper)
        yield
    finally:
        for wrapper in found:
            detach(wrapper._module, wrapper)


class _ThreadWrapper(TemporaryWrapper):
    """Wrapper that makes the calls of the thread that created it through a function, and other threads' as before."""

    def __init__(self, module: nn.Module, run: Run) -> None:
        super().__init__(module)
        self._run = run
        self._thread = threading.get_ident()

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call."""
        own = threading.get_ident() == self._thread
        return (self._run if own else self.run_inner)(module, args, kwargs)


def wrap_calls(modules: Iterable[nn.Module], run: Run) -> AbstractContextManager[None]:
    """Return a context inside which `run` makes this thread's calls of these modules, after the user's hooks.

    For use inside `BatchSnapshot.again`, where no watch records and compiled modules run eagerly.
    """
    return attached(_ThreadWrapper(module, run) for module in {id(one): one for one in modules}.values())


class ExclusiveRun:
    """Exclusive access to a model for the thread that creates this, until `end()`."""

    def __init__(self) -> None:
        self._owner = threading.get_ident()
        self.is_over = False
        self._free = threading.Event()

    def is_ours(self) -> bool:
        """Return whether the calling thread may proceed: the owner, or an autograd thread, perhaps of its backward."""
        return self.is_owned() or torch._C._current_graph_task_id() != -1

    def is_owned(self) -> bool:
        """Return whether the calling thread created this."""
        return threading.get_ident() == self._owner

    def holds_up(self) -> bool:
        """Return whether the calling thread has to wait."""
        return not self._free.is_set() and not self.is_ours()

    def wait(self) -> None:
        """Wait for the end, at most PATIENCE seconds, unless the calling thread may proceed. After that none waits."""
        if not self.is_ours() and not self._free.wait(PATIENCE):
            self._free.set()

    def end(self) -> None:
        """Let the other threads proceed."""
        self.is_over = True
        self._free.set()


class ExclusiveWrapper(TemporaryWrapper):
    """Wrapper during an exclusive run. The owner's calls bypass all watches. Other threads' calls wait."""

    def __init__(self, module: nn.Module, exclusive: ExclusiveRun) -> None:
        super().__init__(module)
        self._exclusive = exclusive

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make the call."""
        if self._exclusive.is_ours():
            return own_call(module)(*args, **kwargs)
        self._exclusive.wait()
        if self._exclusive.is_over:  # the next exclusive run may have begun: start again
            return nn.Module.__call__(module, *args, **kwargs)
        return self.run_inner(module, args, kwargs)


@contextmanager
def unwatched(root: nn.Module) -> Iterator[None]:
    """Record no call of a module in the tree inside the block. Other threads that call one wait for its end.

    The watches stay attached, so that one that is stopped or paused meanwhile stays so.
    """
    exclusive = ExclusiveRun()
    watched = [module for _, module in each_module(root) if wrappers(module)]
    # Hooks of gradients on weights are in no slot, so their recorders are suspended.
    found = {id(one.recorder): one.recorder for module in watched for one in wrappers(module)}
    recorders = [recorder for recorder in found.values() if recorder is not None]
    for recorder in recorders:
        recorder.suspend(True)
    try:
        with attached(ExclusiveWrapper(module, exclusive) for module in watched):
            yield
    finally:
        for recorder in recorders:
            recorder.suspend(False)
        exclusive.end()


# Before its first batch torch.distributed.pipelining calls a stage's module, and its backward, on uninitialised memory
# to infer the shapes of its tensors. Such a call is no batch, and may hold nan.
_STAGE = "torch.distributed.pipelining.stage"
# The first name is torch 2.8's, which infers shapes on zeros. The others are torch 2.13's.
_SHAPE_INFERENCE = ("_shape_inference", "_forward_metadata_inference", "_backward_metadata_inference")


@functools.cache
def skip_shape_inference() -> None:
    """Leave pipelining's shape inference unrecorded: from now, or from when pipelining is imported."""
    when_imported(_STAGE, _change_stage)


def _change_stage() -> None:
    try:
        # An optional part of torch, imported already.
        from torch.distributed.pipelining.stage import PipelineStage

        for name in _SHAPE_INFERENCE:
            if hasattr(PipelineStage, name):
                setattr(PipelineStage, name, _unrecorded(getattr(PipelineStage, name)))
    except Exception as error:  # the import is the user's
        warn_user(
            "nanwatch: what a pipeline stage runs to learn the shapes of its tensors is taken for batches"
            f" ({type(error).__name__}: {error})"
        )


def _unrecorded(infer: Any) -> Any:
    @functools.wraps(infer)
    def unrecorded(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = getattr(self, "submod", None)
        with unwatched(module) if isinstance(module, nn.Module) else nullcontext():
            return infer(self, *args, **kwargs)

    return unrecorded
