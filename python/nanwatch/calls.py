"""What stands between a module and its call while it is watched, and the putting there and taking away of it.

A module is watched through `_compiled_call_impl`, the instance attribute that nn.Module.__call__ asks for before it
runs hooks and forward, and that it leaves out of copies and pickles. A WatchedCall in that place sees a call's
arguments and its result, after every hook of the user's. No hook is registered: any forward hook makes PyTorch itself
0.85 µs slower per call, and its hooks are not told when a forward ends by an exception.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from . import _extension, _live, compiled, rehearsal
from .global_hooks import after_steps, children
from .handles import Handles
from .recorder import PythonRecorder
from .wrapped_names import child_name, is_recorded, named_modules

ATTRIBUTE = "_compiled_call_impl"


class PythonWatchedCall:
    """What stands in a module's `_compiled_call_impl` while a PythonRecorder watches it."""

    def __init__(self, recorder: PythonRecorder, module: nn.Module, inner: Any, node: int) -> None:
        self.recorder = recorder
        self.inner = inner
        self.node = node
        self._module = weakref.ref(module)

    @property
    def module(self) -> nn.Module | None:
        """The module, or None once it is gone."""
        return self._module()

    def __reduce__(self) -> Any:
        """In a copy or a pickle of the module nothing stands here."""
        return type(None), ()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Make the call that this stands before, and record it."""
        if is_compiling():
            return self.module._call_impl(*args, **kwargs)  # type: ignore[union-attr]
        # As StandIn.__call__, but in this frame: torch.compile, which skips this one, would follow a call of it.
        # So it would that of the property.
        caller = sys._getframe(1)
        own = self._module()
        module = caller.f_locals["self"] if caller.f_code.co_name == "_wrapped_call_impl" else own
        if module is None:
            raise ReferenceError("nanwatch: the watched module of this call no longer exists")
        is_replica = module is not own
        if is_replica:
            return module._call_impl(*args, **kwargs)
        target = module._call_impl if self.inner is None else self.inner
        return self.recorder.run(self.node, module, target, args, kwargs)


_KINDS: tuple[Any, ...] = (PythonWatchedCall,)

if _extension.C is not None:
    _Native: Any = _extension.C.WatchedCall

    class NativeWatchedCall(_Native):  # type: ignore[misc]
        """The same for a CallRecorder.

        The interpreter calls C++. The `__call__` below is what a compiler reads that follows Python code: to it a
        watched module is the module itself.
        """

        def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
            """Make the module's call; never run by the interpreter."""
            return self.module._call_impl(*args, **kwargs)

    _extension.C.take_call(NativeWatchedCall)
    _KINDS += (NativeWatchedCall,)


def _watched_call(recorder: Any, module: nn.Module, inner: Any, node: int) -> Any:
    if isinstance(recorder, PythonRecorder):
        return PythonWatchedCall(recorder, module, inner, node)
    return NativeWatchedCall(recorder, module, inner, node)


def chain(module: nn.Module) -> list[Any]:
    """The watched calls in the module's place, the outermost first."""
    found = []
    current: Any = module.__dict__.get(ATTRIBUTE)
    while isinstance(current, _KINDS):
        found.append(current)
        current = current.inner
    return found


class Attachment:
    """A recorder on the modules of one model, until `remove`.

    `observed(name)` says whether the calls of a module are recorded; the calls of the others only mark where a batch
    begins. `allow_inf(name)` says whether infinities in them are meant. `parts` are the letters of what is looked at:
    weights, buffers, inputs, outputs. Modules registered later in one of the watched modules are watched too.
    """

    def __init__(
        self,
        model: nn.Module,
        recorder: Any,
        observed: Callable[[str], bool],
        allow_inf: Callable[[str], bool],
        parts: str = "wbio",
    ) -> None:
        self.is_attached = True
        self._recorder = recorder
        self._parts = parts
        self._told_of_lost = False
        self._watch = _live.enter(model, recorder)
        # What the operators in compiled code are said to write; see _ops.record_.
        self._sequence = _new_sequence(torch.device("cpu"))
        self._device_sequences: dict[torch.device, torch.Tensor] = {}
        compiled.install()
        rehearsal.install()
        self._observed = observed
        self._allow_inf = allow_inf
        # Not the calls themselves: a second reference to one is how it knows that its module's __dict__ was copied.
        self._names: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
        self._nodes: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._root = weakref.ref(model)
        # FSDP's own classes the recorder knows. The model may be a part of what was sharded as a whole.
        if any(type(x).__name__ == "DTensor" for x in model.parameters()):
            recorder.gathers_weights = True
        for one in named_modules(model):
            self._add(one.name, one.module)
        # torch's registries are global and outlive this: what they hold must not keep it, or the model, alive.
        this = weakref.ref(self)

        def changed(*_: Any) -> None:
            # Fused optimizers write past the version counter; the step itself is the only sign.
            if (attachment := this()) is not None:
                attachment._recorder.forget_weights()

        def registered(parent: nn.Module, name: str, module: nn.Module | None) -> None:
            if (attachment := this()) is not None and module is not None:
                attachment._registered(parent, name, module)

        self._hooks = Handles(self, [after_steps.add(changed), children.add(registered)])

    def _add(self, name: str, module: nn.Module) -> None:
        if module in self._names:
            return
        self._names[module] = name
        self._nodes[module] = self._recorder.add_node(
            name, module, self._records(module), self._allow_inf(name)
        )
        self._link(module)

    def _records(self, module: nn.Module) -> bool:
        return is_recorded(module) and self._observed(self._names[module])

    def _link(self, module: nn.Module) -> None:
        node = self._nodes[module]
        call = _watched_call(self._recorder, module, module.__dict__.get(ATTRIBUTE), node)
        # For compiled code; `site` is the same as a word, by which Dynamo knows that the place is as it was.
        call.attachment = weakref.ref(self)
        call.place = (self._watch, node, self._parts if self._records(module) else "")
        call.site = f"{self._watch}.{node}.{call.place[2]}"
        call.sequence = self._sequence
        # Not by setattr: a ScriptModule, or a class with a __setattr__ of its own, would make an attribute of it.
        module.__dict__[ATTRIBUTE] = call

    def _registered(self, parent: nn.Module, name: str, module: nn.Module) -> None:
        known = self._names.get(parent)
        if known is None:
            return
        for one in named_modules(module, child_name(parent, known, name)):
            self._add(one.name, one.module)

    def lost(self) -> list[str]:
        """The names of modules whose place somebody else has taken, as `module.compile()` does."""
        return [name for module, name in self._names.items() if not _is_linked(module, self._recorder)]

    def warn_of_lost(self) -> None:
        """Warn, once, when there are such modules."""
        lost = self.lost()
        if not lost or self._told_of_lost:
            return
        self._told_of_lost = True
        shown = ", ".join(name or "the root module" for name in lost[:3])
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        warnings.warn(
            f"nanwatch no longer sees the calls of {shown}{more}: `compile()` or other code has taken their place."
            " Compile first and watch then.",
            RuntimeWarning,
            stacklevel=3,
        )

    def relink(self) -> None:
        """Stand before what `module.compile()` has put in the place since. Called while such a module is compiled."""
        for module in list(self._names):
            if ATTRIBUTE in module.__dict__ and not _is_linked(module, self._recorder):
                self._link(module)
                if module is self._root():
                    # Its call is under way, and went past its place.
                    self._recorder.adopt_compiled(self._nodes[module])

    def put_sequence(self, call: Any, device: torch.device) -> None:
        """Give the call, as `device_sequence`, what the operators in a graph that is all on this device write."""
        if device not in self._device_sequences:
            self._device_sequences[device] = _new_sequence(device)
        call.device_sequence = self._device_sequences[device]

    def remove(self) -> None:
        """Leave every module as it was found. A second time does nothing."""
        self.is_attached = False
        self._recorder.paused = True
        _live.leave(self._recorder)
        self._recorder.forget_tensors()
        self._hooks.remove()
        for module in list(self._names):
            _unlink(module, self._recorder)
        self._names.clear()


def _new_sequence(device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.zeros(1, dtype=torch.int64, device=device)


def put(module: nn.Module, call: Any) -> None:
    """Make this what stands before the module's call; None for nothing."""
    if call is None:
        module.__dict__.pop(ATTRIBUTE, None)
    else:
        module.__dict__[ATTRIBUTE] = call


def _is_linked(module: nn.Module, recorder: Any) -> bool:
    return any(call.recorder is recorder for call in chain(module))


def _unlink(module: nn.Module, recorder: Any) -> None:
    """Take the recorder's call out of the module's place, also from behind those that others put there since."""
    outer: Any = None
    for call in chain(module):
        if call.recorder is not recorder:
            outer = call
        elif outer is None:
            put(module, call.inner)
            return
        else:
            outer.inner = call.inner
            return
