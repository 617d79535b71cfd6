"""Starts of batches in PythonRecorder: what csrc/recorder/batch_start.h keeps, each taken anew."""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .events import Start

_CONSTANTS = (int, float, complex, str, bytes, bool, tuple, type(None))


class KeptStart:
    """Start of a batch. The graph of the batch holds it."""

    __slots__ = ("__weakref__", "_module", "_start", "began")

    def __init__(
        self,
        batch: int,
        is_function: bool,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
        extra: object,
    ) -> None:
        self.began = time.monotonic()
        values = [*args, *(kwargs or {}).values()]
        for value in values.copy():
            values += value if isinstance(value, tuple | list) else ()
            values += value.values() if isinstance(value, dict) else ()
        # By the class alone: an object may say by its `__class__` that it is a tensor.
        tensors = [x for x in values if issubclass(type(x), Tensor)]
        with torch._C.DisableTorchFunction():  # no function mode of the user sees the reads
            versions = [(x, x._version) for x in tensors if not x.is_inference()]
        named = [(x, attributes_of(x)) for x in values if not issubclass(type(x), Tensor | type)]
        self._module: weakref.ref[nn.Module] | None = None
        self._start = Start(
            batch,
            module,
            args,
            kwargs,
            torch.get_rng_state(),
            tuple(
                (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind))
                for kind in ("cpu", "cuda")
            ),
            torch.is_inference_mode_enabled(),
            torch.is_grad_enabled(),
            versions,
            [
                (x, dict(attributes))
                for x, attributes in named
                if attributes and all(type(value) in _CONSTANTS for value in attributes.values())
            ],
            0.0,
            (torch._C._autograd._get_sequence_nr(), -1),
            is_function,
            extra,
        )

    @property
    def start(self) -> Start:
        """Return the start as it is now."""
        module = self._start.module if self._module is None else self._module()
        return self._start._replace(module=module, elapsed=time.monotonic() - self.began)

    @property
    def has_graph(self) -> bool:
        """Return whether the batch ran in grad mode."""
        return self._start.grad

    def end(self) -> None:
        """Take the end of the forward. A model that keeps its output would else keep itself."""
        module = self._start.module
        self._module = None if module is None else weakref.ref(module)
        nodes = self._start.nodes[0], torch._C._autograd._get_sequence_nr()
        self._start = self._start._replace(module=None, nodes=nodes)

    def let_go(self) -> None:
        """Keep nothing of the call but its place among others."""
        self._module = None
        self._start = self._start._replace(
            module=None, args=(), kwargs=None, versions=[], attributes=[], extra=None
        )


def attributes_of(value: object) -> dict[str, Any]:
    """Return the attributes of an object, without asking the object: it may define `__getattribute__`."""
    try:
        attributes: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return attributes
