"""Buffers and training flags of a model around a re-run: as before the batch, and as the failure left them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, jit, nn
from torch.nn.modules.batchnorm import _NormBase

from ..numerics._reference import without_repeats
from ..numerics.readable import is_plain, only_our_dispatch, unreadable
from ..util.modules import each_module

# Bytes of the largest buffer that is copied at the start of a batch: the statistics of 16,384 channels.
_MOST_BYTES = 1 << 16


class BufferValue(NamedTuple):
    """Value of a buffer at some batch's start. `value` is None where the buffer is too large to be copied."""

    buffer: weakref.ref[Tensor]
    version: int
    value: Tensor | None


# Values of buffers by the buffer's id.
BufferValues = Mapping[int, BufferValue]


class BufferHistory:
    """Values of a model's small buffers at the start of the present batch.

    A batch copies only buffers that were written to since the batch before, as their version counters say. The running
    statistics of PyTorch's normalisations are left out: what a training forward computes does not depend on them.
    """

    def __init__(self) -> None:
        self._num_batches = 0
        self._modules: list[weakref.ref[nn.Module]] = []
        self._values: dict[int, BufferValue] = {}

    def note(self, root: nn.Module) -> BufferValues:
        """Return the present values. The mapping never changes: batches share it until a buffer is written to."""
        self._num_batches += 1
        if self._num_batches & (self._num_batches - 1) == 0:  # modules may have come meanwhile
            self._modules = [
                weakref.ref(module)
                for _, module in each_module(root)
                if not isinstance(module, _NormBase) and any(True for _ in module._buffers)
            ]
        changed = []
        with torch._C.DisableTorchFunction():  # no subclass and no function mode sees the reads
            for reference in self._modules:
                module = reference()
                for x in () if module is None else module._buffers.values():
                    if x is None:
                        continue
                    known = self._values.get(id(x))
                    if (
                        known is None
                        or known.buffer() is not x
                        or (known.value is not None and known.version != x._version)
                    ):
                        changed.append(x)
        if changed and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            self._copy(changed)
        return self._values

    def names(self) -> list[tuple[weakref.ref[nn.Module], str]]:
        """Return the buffers whose changes count, each by its module and name. Large ones are not copied."""
        buffers = []
        for reference in self._modules:
            module = reference()
            for name, x in () if module is None else module._buffers.items():
                known = self._values.get(id(x))
                if known is None or known.value is not None:
                    buffers.append((reference, name))
        return buffers

    def _copy(self, changed: list[Tensor]) -> None:
        with only_our_dispatch(), torch.no_grad():
            values = {key: known for key, known in self._values.items() if known.buffer() is not None}
            small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
            for x in changed:
                if not is_plain(x) or x.is_inference() or unreadable(x) or x.nbytes > _MOST_BYTES:
                    values[id(x)] = BufferValue(weakref.ref(x), 0, None)
                else:
                    small.setdefault((x.dtype, x.device), []).append(x)
            for buffers in small.values():
                copies = torch.cat([x.reshape(-1) for x in buffers])  # one kernel for all of them
                for x, copied in zip(buffers, copies.split([x.numel() for x in buffers]), strict=True):
                    values[id(x)] = BufferValue(weakref.ref(x), x._version, copied.view(x.shape))
            self._values = values


def begin_again(root: nn.Module, given: Iterable[Tensor], before: BufferValues) -> Callable[[], None]:
    """Set the buffers below `root` to their values `before`. Return a function that puts back what is there now.

    It puts back buffers, training flags and the tensors that the call was `given`, and their version counters: the
    user's own call may be under way, and have saved them for its backward.
    """
    with only_our_dispatch():
        modules = [module for _, module in each_module(root)]
        flags = [(module, module.training) for module in modules]
        # Those of a ScriptModule cannot be exchanged.
        tables = [(x._buffers, dict(x._buffers)) for x in modules if not isinstance(x, jit.ScriptModule)]
        buffers = [x for module in modules for _, x in module._buffers.items() if x is not None]
        tensors = {id(x): x for x in (*buffers, *given) if not _is_fixed(x)}.values()
        kept = [(x, None if x.is_inference() else x._version, x.detach().clone()) for x in tensors]
        for x in buffers:
            known = before.get(id(x))
            if known is not None and known.buffer() is x and known.value is not None:
                _write(x, known.value, x._version)

    def put_back() -> None:
        with only_our_dispatch():
            for table, names in tables:
                if [id(x) for x in table.values()] != [id(x) for x in names.values()]:
                    table.clear()
                    table.update(names)
            for x, version, value in kept:
                # BatchNorm writes its statistics past the version counter.
                if (version is not None and x._version != version) or not torch.equal(x, value):
                    _write(x, value, version)
            for module, flag in flags:
                module.training = flag

    return put_back


def _is_fixed(x: Tensor) -> bool:
    """Return whether nothing writes to it: it has no values, or elements that share their memory."""
    return x.is_meta or without_repeats(x)[1] > 1


def _write(x: Tensor, value: Tensor, version: int | None) -> None:
    with torch.inference_mode() if version is None else nullcontext(), torch.no_grad():
        x.copy_(value)
    if version is not None:
        torch._C._autograd._unsafe_set_version_counter((x,), (version,))
