"""Functions of PyTorch without a hook, which an audit has to see: backwards, clips and reductions.

Each ends in a function that it looks up in its module at every call. While somebody listens, a wrapper stands there.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.compiler import is_compiling

from ..util.visible import suppressed


class Tap:
    """Wrapper of one function of a module. Listeners have a method that gets its arguments, before or after it ran."""

    def __init__(self, module: Any, name: str, method: str, *, is_before: bool) -> None:
        self._module = module
        self._name = name
        self._method = method
        self._is_before = is_before
        self._lock = threading.Lock()
        self._listeners: list[weakref.ref[Any]] = []

    def add(self, listener: object) -> None:
        """Call the listener's method, as long as it lives or until `remove`."""
        with self._lock:
            self._listeners.append(weakref.ref(listener))
            original = getattr(self._module, self._name, None)
            if original is not None and not hasattr(original, "_nanwatch"):
                setattr(self._module, self._name, self._wrapped(original))

    def remove(self, listener: object) -> None:
        """Call it no more. With the last listener PyTorch's function is there again."""
        with self._lock:
            self._listeners = [
                reference for reference in self._listeners if reference() not in (None, listener)
            ]
            original = getattr(getattr(self._module, self._name, None), "_nanwatch", None)
            if not self._listeners and original is not None:
                setattr(self._module, self._name, original)

    def _wrapped(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return original(*args, **kwargs)
            if self._is_before:
                self._tell(args, kwargs)
            result = original(*args, **kwargs)
            if not self._is_before:
                self._tell(args, kwargs)
            return result

        call._nanwatch = original  # type: ignore[attr-defined]
        return call

    def _tell(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            for reference in list(self._listeners):
                if (listener := reference()) is not None:
                    getattr(listener, self._method)(*args, **kwargs)
        except Exception:
            suppressed(f"a call of {self._name} could not be audited")


backwards = Tap(torch.autograd, "backward", "backward_starts", is_before=True)
clips = Tap(torch.nn.utils.clip_grad, "_clip_grads_with_norm_", "clipped", is_before=False)
reductions = Tap(torch.distributed, "all_reduce", "reduced", is_before=True)
ALL = (backwards, clips, reductions)
