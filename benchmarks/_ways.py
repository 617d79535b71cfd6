"""The ways to run a model whose costs are compared, each a context that can be entered as often as one likes.

All of them share one model: what a way leaves on it is taken off when its context ends and put back at the next, so
that what a watch remembers of the weights stays, as in a run of many steps.
"""

from __future__ import annotations

import contextlib
import io
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nanwatch
from nanwatch.instrumentation.slot import attach, detach, wrappers
from nanwatch.session.api import make_options, start_watch

Way = Callable[[], AbstractContextManager[Any]]

# By the name that `--ways` takes; those that look at backwards are for training alone.
NAMES = (
    *("nanwatch", "transformers", "hooks", "forecast-off", "no-box", "trace", "fingerprints", "gradients"),
    *("detect-anomaly", "debug-mode"),
)
OF_BACKWARDS = ("gradients", "detect-anomaly")
# Far from 1 they need few rounds, and one of them takes as long as several of the others.
SLOW = ("transformers", "detect-anomaly", "debug-mode")


class Ways:
    """The ways of these names on `model`, and the plain one; `by_name` has a context for each.

    `folder` is where the trace goes.
    """

    def __init__(self, model: nn.Module, names: set[str], folder: Path) -> None:
        self.watches: dict[str, nanwatch.Watch] = {}
        self._model = model
        self.by_name: dict[str, Way] = {"plain": contextlib.nullcontext}
        options: dict[str, dict[str, Any]] = {
            "nanwatch": {},
            "forecast-off": {"forecast": False},
            "no-box": {"black_box": False},
            "trace": {"trace": folder / "trace"},
            "fingerprints": {"trace": nanwatch.Trace(folder / "bits", fingerprints=True)},
            "gradients": {"gradients": True},
        }
        for name in options.keys() & names:
            self.by_name[name] = self._watching(name, options[name])
        if "detect-anomaly" in names:
            self.by_name["detect-anomaly"] = _anomaly
        if "debug-mode" in names:
            self.by_name["debug-mode"] = _hashes_of_operations
        if "transformers" in names:
            from transformers.debug_utils import DebugUnderflowOverflow

            self.by_name["transformers"] = _swap_hooks(model, lambda: DebugUnderflowOverflow(model))
        if "hooks" in names:
            self.by_name["hooks"] = _swap_hooks(
                model, lambda: model.apply(lambda module: module.register_forward_hook(lambda *_: None))
            )

    def writer_seconds(self) -> float:
        """The CPU time so far of the thread that writes the trace. Being in rounds of all ways, it is in no ratio."""
        watch = self.watches.get("trace")
        if watch is None or watch._tracer is None:
            return 0.0
        identity = watch._tracer.writer._thread.ident
        assert identity is not None
        return time.clock_gettime(time.pthread_getcpuclockid(identity))

    def stop(self) -> None:
        """Stop all watches; the trace is whole on disk then."""
        for watch in self.watches.values():
            watch.stop()

    def _watching(self, name: str, options: dict[str, Any]) -> Way:
        self.watches[name] = start_watch(self._model, make_options(options))
        calls = [(module, wrappers(module)[0]) for module in self._model.modules()]
        for module, call in calls:
            detach(module, call)

        @contextmanager
        def installed() -> Iterator[None]:
            for module, call in calls:
                attach(module, call)
            try:
                yield
            finally:
                for module, call in calls:
                    detach(module, call)
                # Hooks on weights outlive graphs, and the next forward puts them back. Nobody else has any here.
                for x in self._model.parameters() if options.get("gradients") else ():
                    x._backward_hooks = None

        return installed


@contextmanager
def _anomaly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow
        with torch.autograd.detect_anomaly():
            yield


@contextmanager
def _hashes_of_operations() -> Iterator[None]:
    """torch's own log of a hash, the L1 norm, of every operation's result."""
    from torch.utils._debug_mode import DebugMode

    with DebugMode(), DebugMode.log_tensor_hashes():
        yield


def _swap_hooks(model: nn.Module, install: Callable[[], object]) -> Way:
    """The hooks that `install` registers, without registering them again."""
    install()
    hooks = {module: dict(module._forward_hooks) for module in model.modules()}
    for module in hooks:
        module._forward_hooks.clear()

    @contextmanager
    def installed() -> Iterator[None]:
        for module, kept in hooks.items():
            module._forward_hooks.update(kept)
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                yield
        finally:
            for module in hooks:
                module._forward_hooks.clear()

    return installed
