"""Recording of a run for comparison: the fingerprint of each tensor that its modules and optimizers pass on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling
from torch.optim import Optimizer

from ..instrumentation.global_hooks import after_steps, before_steps
from ..instrumentation.slot import set_default_call
from ..numerics.ranges import fingerprint
from ..numerics.readable import dtype_name
from ..recording.walk import call_leaves, leaves
from ..util.modules import WeakIdentityDict, each_module, has_parameters
from ..util.visible import module_name, spell, visible

_AT = {
    "weight": "before the call of {}",
    "buffer": "before the call of {}",
    "gradient": "of {}, its gradient",
    "step": "of {}, after the optimizer's step",
    "end": "of the script",
}


class TensorPrint(NamedTuple):
    """Tensor or number of a run with the fingerprint of its bits, and the thread that passed it on.

    `form` is its dtype and shape. `kind` is "weight" or "buffer" (before the call of its module), "input", "output",
    "gradient" (of an output, or of a weight before the step), "step" (a weight after the optimizer's step) or "end"
    (the exception that ended the run).
    """

    batch: int
    kind: str
    module: str
    class_name: str
    label: str
    form: str
    bits: int
    thread: str = ""

    @property
    def where(self) -> str:
        """The tensor in words, such as "`output` of fc1 (Linear)"."""
        named = module_name(self.module)
        if self.class_name and self.class_name != self.module:
            named += f" ({visible(self.class_name)})"
        return f"`{visible(self.label)}` {_AT.get(self.kind, 'of {}').format(named)}"


@dataclass
class Recording:
    """One run: its tensors in order, and what else was noted.

    `error` is the exception that ended the run, in words. `notes` are calls that a trial has replaced.
    """

    tensors: list[TensorPrint] = field(default_factory=list)
    batches: int = 0
    error: str = ""
    notes: list[str] = field(default_factory=list)


class EnoughError(BaseException):
    """Raised in the script at the start of the first batch that is not wanted. No Exception, which it might catch."""


class Recorder:
    """Recorder of the calls of all modules, the gradients of their outputs, and all optimizer steps.

    With `most_batches` a further call of the first model ends the run by EnoughError. The first model is the first
    module with parameters that is called from outside any other; its calls are the batches.
    """

    def __init__(self, most_batches: int | None = None) -> None:
        self.recording = Recording()
        self._most_batches = most_batches
        self._model: nn.Module | None = None
        self._local = threading.local()
        # Path and class of modules; path, class and label of parameters.
        self._names: WeakIdentityDict[tuple[str, ...]] = WeakIdentityDict()
        self._is_running = False

    def start(self) -> None:
        """Record from now on. The hooks stay: they record nothing after `stop`, and the process ends soon."""
        set_default_call(self._default_call())
        before_steps.add(self._step_hook("gradient"))
        after_steps.add(self._step_hook("step"))
        self._is_running = True

    def stop(self) -> None:
        """Record no more."""
        self._is_running = False

    def _add_leaf(self, leaf: Any, kind: str, module: str, class_name: str, label: str) -> None:
        if isinstance(leaf, Tensor):
            form, bits = _read(leaf)
        elif isinstance(leaf, bool | int | float | complex | str):
            form = type(leaf).__name__
            bits = int.from_bytes(blake2b(repr(leaf).encode(), digest_size=8).digest(), "little")
        else:
            return
        thread = threading.current_thread()
        # Threads that only PyTorch knows have a new number in each run.
        name = "" if thread is threading.main_thread() else thread.name.partition("-")[0]
        batch = max(self.recording.batches - 1, 0)
        self.recording.tensors.append(TensorPrint(batch, kind, module, class_name, label, form, bits, name))

    def _default_call(self) -> Callable[..., Any]:
        def call(module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            # A compiler reads this function too; to it the module is itself.
            if is_compiling() or not self._may_read():
                return module._call_impl(*args, **kwargs)
            return self._call(module, args, kwargs)

        return call

    def _may_read(self) -> bool:
        return (
            self._is_running
            and not is_compiling()
            and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
            and torch._C._functorch.peek_interpreter_stack() is None
            and not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
        )

    def _call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        stack: list[str] = vars(self._local).setdefault("stack", [])
        if not stack:
            self._begin(module)
        name, class_name = self._name(module, stack)
        for kind, tensors in (("weight", module._parameters), ("buffer", module._buffers)):
            for label, x in tensors.items():
                if x is not None:
                    self._names[x] = (name, class_name, label)
                    self._add_leaf(x, kind, name, class_name, label)
        for label, x in call_leaves(args, kwargs):
            self._add_leaf(x, "input", name, class_name, label)
        stack.append(name)
        try:
            result = module._call_impl(*args, **kwargs)
        finally:
            stack.pop()
        for label, x in leaves(result, "output"):
            self._add_leaf(x, "output", name, class_name, label)
            if isinstance(x, Tensor) and x.grad_fn is not None:
                x.register_hook(self._gradient_hook(name, class_name, label))
        return result

    def _begin(self, module: nn.Module) -> None:
        """Begin an outermost call, which may be a batch, and name the parts of the module."""
        if self._model is None and has_parameters(module):
            self._model = module
        if module is self._model:
            if self.recording.batches == self._most_batches:
                raise EnoughError
            self.recording.batches += 1
        is_first = not self._names.objects()
        for path, part in each_module(module) if self._names.get(module) is None else ():
            if self._names.get(part) is None:
                full = path if is_first else ".".join(filter(None, (type(module).__name__, path)))
                self._names[part] = (full, type(part).__name__)

    def _gradient_hook(self, name: str, class_name: str, label: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            if self._may_read():
                self._add_leaf(gradient, "gradient", name, class_name, label)

        return hook

    def _name(self, module: nn.Module, stack: list[str]) -> tuple[str, ...]:
        if (named := self._names.get(module)) is None:  # made during the call of another
            class_name = type(module).__name__
            outer = stack[-1] if stack else ""
            named = self._names[module] = (f"{outer}.({class_name})".lstrip("."), class_name)
        return named

    def _step_hook(self, kind: str) -> Callable[..., None]:
        """Return a hook that records the gradients, or the weights, of an optimizer."""

        def hook(optimizer: Optimizer, *_: Any) -> None:
            for i, group in enumerate(optimizer.param_groups) if self._may_read() else ():
                for j, x in enumerate(group["params"]):
                    place = self._names.get(x) or ("", type(optimizer).__name__, f"param_groups[{i}][{j}]")
                    value = x.grad if kind == "gradient" else x
                    if value is not None:
                        self._add_leaf(value, kind, *place)

        return hook


def _read(x: Tensor) -> tuple[str, int]:
    form = f"{dtype_name(x.dtype)} {list(x.shape)}"
    try:
        return form, fingerprint(x)
    except TypeError as error:  # meta, sparse, nested: see nanwatch.fingerprint
        return f"{form}, not compared: {spell(error)}", 0
