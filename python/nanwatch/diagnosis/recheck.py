"""Module calls made again while a run goes on, to find results that only a fault of the hardware explains.

The module's `forward` is called again inside its call, from the same tensors, on the same device, without gradients.
Hooks run once, around both, and `fully_shard` has gathered the weights between them. Only modules of PyTorch that draw
no random numbers and write to nothing are called again: everything else would have to be put back. A difference counts
when two further calls agree with each other, and when the module's call before or after it was equal: kernels that
differ without gradients, or from run to run, differ in each.
"""

from __future__ import annotations

import socket
import sys
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.compiler import is_compiling

from ..distributed.replica_bytes import bytes_of, measure
from ..instrumentation.slot import CallWrapper, attach, detach
from ..instrumentation.wrapped_names import named_modules
from ..numerics import _extension
from ..recording.events import WatchPart
from ..report.hardware_suspect import HardwareSuspect
from ..util.job import rank
from ..util.visible import suppressing

_PURE = frozenset(
    f"{name}{dims}"
    for name, several in {
        **dict.fromkeys(("Conv", "ConvTranspose", "AvgPool", "AdaptiveAvgPool", "MaxPool"), "123"),
        **dict.fromkeys(("Linear", "Bilinear", "Embedding", "LayerNorm", "RMSNorm", "GroupNorm"), ""),
        **dict.fromkeys(("ReLU", "GELU", "SiLU", "ELU", "LeakyReLU", "Mish", "Softplus", "Hardswish"), ""),
        **dict.fromkeys(("Tanh", "Sigmoid", "Softmax", "LogSoftmax"), ""),
    }.items()
    for dims in ([f"{dim}d" for dim in several] or [""])
)
_FIRST = 2  # batch: what is compiled is compiled by then
_PLAIN = (Tensor, nn.Parameter)


def impure(module: nn.Module) -> str:
    """Return why a call of the module is not made again, "" where it can be."""
    kind = _own_class(module)
    if not kind.__module__.startswith("torch.nn.modules.") or kind.__name__ not in _PURE:
        return "it may draw random numbers, keep state or call other modules"
    if "forward" in vars(module):
        return "it has a forward of its own"
    if getattr(module, "inplace", False) or getattr(module, "max_norm", None) is not None:
        return "it writes to its input or its weight"
    return ""


def _own_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, for the class that `fully_shard` made of it the one that it had before."""
    kind = type(module)
    if hasattr(kind, "_get_fsdp_state"):
        return next(base for base in kind.__mro__[1:] if issubclass(base, nn.Module))
    return kind


class Recheck(WatchPart):
    """Part of a Watch with `recheck`: makes one in `every` calls of pure modules again, in turn.

    `tell(suspect)` is called inside the module's call. No error of this leaves it. `skipped` says of each leaf module
    that is never called again why.
    """

    def __init__(self, model: nn.Module, every: int, tell: Callable[[HardwareSuspect], object]) -> None:
        self.suspects: deque[HardwareSuspect] = deque(maxlen=16)
        self.skipped: dict[str, str] = {}
        self.num_made = 0
        self._every, self._tell = every, tell
        self._batch = 0
        self._pure: deque[tuple[str, weakref.ref[nn.Module]]] = deque()
        for one in named_modules(model):
            if not one.module._modules:
                if why := impure(one.module):
                    self.skipped[one.name] = why
                else:
                    self._pure.append((one.name, weakref.ref(one.module)))
        self._num_calls = 0  # since the last one that was made again
        self._armed: dict[str, _Again] = {}
        self._agreed: set[str] = set()
        self._open: dict[str, HardwareSuspect] = {}

    def batch_started(self, batch: int, module: nn.Module | None = None) -> None:
        """Choose the calls of this batch that are made again."""
        self._batch = batch
        if batch < _FIRST or _is_compiled():
            return
        self._num_calls += len(self._pure)
        due, self._num_calls = divmod(self._num_calls, self._every)
        for _ in range(min(due, len(self._pure))):
            self._pure.rotate(-1)
            self._arm(*self._pure[-1])
        for name, reference in [one for one in self._pure if one[0] in self._open]:
            self._arm(name, reference)

    def _arm(self, name: str, reference: weakref.ref[nn.Module]) -> None:
        module = reference()
        if module is not None and name not in self._armed and name not in self.skipped and not impure(module):
            self._armed[name] = again = _Again(self, name, module)
            attach(module, again)

    def disarm(self, name: str) -> None:
        """Take the wrapper off the module again."""
        again = self._armed.pop(name, None)
        module = None if again is None else again.module()
        if again is not None and module is not None:
            detach(module, again)

    def compare(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any) -> None:
        """Make the call again, and tell of a difference that nothing else explains."""
        given = (*args, *kwargs.values(), *module._parameters.values(), output)
        tensors = [x for x in given if x is not None and not isinstance(x, bool | int | float | tuple | list)]
        if any(type(x) not in _PLAIN or x.layout is not torch.strided for x in tensors) or _is_traced():
            return
        self.num_made += 1
        again = _made_again(module, args, kwargs)
        if _alike(output, again):
            self._agreed.add(name)
            if (suspect := self._open.pop(name, None)) is not None:
                self._found(suspect)
            return
        if not _alike(again, _made_again(module, args, kwargs)):
            self.skipped[name] = "two calls of it after each other differ"
            return
        if self._open.pop(name, None) is not None:
            self.skipped[name] = "its calls without gradients differ from those of the run"
            return
        suspect = self._suspect(name, module, output, again)
        if name in self._agreed:
            self._found(suspect)
        else:
            self._open[name] = suspect

    def _suspect(self, name: str, module: nn.Module, output: Tensor, again: Tensor) -> HardwareSuspect:
        a, b = (bytes_of(x.detach().cpu()) for x in (output, again))
        distance = measure(a, b, output.dtype, self._batch)
        device, kind = str(output.device), _own_class(module).__name__
        if output.is_cuda:
            device += f" ({torch.cuda.get_device_name(output.device)})"
        return HardwareSuspect(self._batch, name, kind, rank(), socket.gethostname(), device, distance)

    def _found(self, suspect: HardwareSuspect) -> None:
        self.suspects.append(suspect)
        self._tell(suspect)

    def remove(self) -> None:
        """Leave the modules as they were found."""
        for name in list(self._armed):
            self.disarm(name)


class _Again(CallWrapper):
    """Wrapper of one call, whose forward is made again when it has ended."""

    def __init__(self, owner: Recheck, name: str, module: nn.Module) -> None:
        self.inner: Any = None
        self.module = weakref.ref(module)
        self._owner, self._name = owner, name

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Make the call with a forward that is made again."""
        module = self.module()
        if module is None:
            raise ReferenceError("nanwatch: the module of this call no longer exists")
        call = module._call_impl if self.inner is None else self.inner
        if is_compiling():
            return call(*args, **kwargs)
        self._owner.disarm(self._name)
        held = vars(module)
        # Not by setattr: a class with a __setattr__ of its own would make something else of it.
        held.setdefault("forward", self._forward)
        try:
            return call(*args, **kwargs)
        finally:
            if self._forward == held.get("forward"):  # a hook before it raised
                del held["forward"]

    def _forward(self, /, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        assert module is not None
        vars(module).pop("forward", None)
        output = module.forward(*args, **kwargs)
        with suppressing("a call could not be made again"):
            self._owner.compare(self._name, module, args, kwargs, output)
        return output


def _made_again(module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> Tensor:
    # A cast that autocast caches without gradients would cut the weight out of the graph.
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.no_grad():
            output: Tensor = type(module).forward(module, *args, **kwargs)
            return output
    finally:
        torch.set_autocast_cache_enabled(cached)


def _alike(a: Tensor, b: Tensor) -> bool:
    with torch.no_grad():
        return int(_extension.fingerprint(a.detach())) == int(_extension.fingerprint(b.detach()))


def _is_traced() -> bool:
    """Return whether somebody else would see the calls: a mode, a transform, a capture."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._get_tracing_state() is not None
        or peek_interpreter_stack() is not None
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    )


def _is_compiled() -> bool:
    """Return whether torch.compile has read code of this process: a wrapper there would have it compiled again."""
    convert = sys.modules.get("torch._dynamo.convert_frame")
    return convert is not None and any(code() is not None for code in convert.input_codes.seen)
