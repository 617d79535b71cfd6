"""Snapshot of all that a run changes and that PyTorch can put back."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.optim import Optimizer

from ..instrumentation.execution_context import RngState
from ..util.modules import each_module
from ..util.visible import suppressed

Restore = Callable[[], object]


class State:
    """Snapshot of modules, optimizers, other stateful objects and all global random states.

    Modules: parameters, buffers, gradients, training flags. Optimizers: state and groups. Random number generators and
    tensors: their values. Anything else: its state_dict(). `restore()` puts it back, as often as is wanted.
    """

    def __init__(self, objects: Iterable[object]) -> None:
        self.modules: list[nn.Module] = []
        self._restores: list[Restore] = []
        self._tensors: dict[int, Tensor] = {}
        for one in objects:
            self._add(one)
        self._rng = RngState.capture(others=True)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Restore at the end of the block, with the version counters of the tensors as they were."""
        with ExitStack() as counters:
            for x in self._tensors.values():
                if not x.is_inference():
                    counters.enter_context(_unsafe_preserve_version_counter(x))
            try:
                yield
            finally:
                self.restore()

    def restore(self) -> None:
        """Put everything back."""
        with torch.no_grad():
            for one in self._restores:
                one()
        self._rng.restore()

    def storages(self) -> set[int]:
        """Return the keys of the storages that `restore` writes to."""
        return {x.untyped_storage()._cdata for x in self._tensors.values() if x.layout is torch.strided}

    def _add(self, one: object) -> None:
        if isinstance(one, nn.Module):
            self._add_module(one)
        elif isinstance(one, Optimizer):
            self._add_optimizer(one)
        elif isinstance(one, Tensor):
            self._add_tensor(one)
        else:
            restore = restorer(one)
            if restore is None:
                raise TypeError(
                    f"state should hold modules, optimizers, tensors, random number generators and objects with"
                    f" state_dict() and load_state_dict(), got {type(one).__name__}"
                )
            self._restores.append(restore)

    def _add_module(self, root: nn.Module) -> None:
        self.modules.append(root)
        for _, module in each_module(root):
            parameters, buffers = dict(module._parameters), dict(module._buffers)
            self._restores.append(functools.partial(_put_back, module, parameters, buffers, module.training))
            for x in (*parameters.values(), *buffers.values()):
                if x is not None:
                    self._add_tensor(x)

    def _add_optimizer(self, optimizer: Optimizer) -> None:
        for group in optimizer.param_groups:
            for x in group["params"]:
                self._add_tensor(x)
        state = {x: saved(value) for x, value in optimizer.state.items()}
        groups = [
            {key: saved(value) for key, value in g.items() if key != "params"} for g in optimizer.param_groups
        ]

        def restore() -> None:
            optimizer.state.clear()
            for x, value in state.items():
                optimizer.state[x] = value()
            for group, values in zip(optimizer.param_groups, groups, strict=False):
                group.update({key: value() for key, value in values.items()})

        self._restores.append(restore)

    def _add_tensor(self, x: Tensor) -> None:
        if id(x) in self._tensors or nn.parameter.is_lazy(x):
            return
        self._tensors[id(x)] = x
        value, grad = saved(x), None if not x.is_leaf or x.grad is None else saved(x.grad)

        def restore() -> None:
            value()
            if x.is_leaf and (x.requires_grad or x.grad is not None):
                x.grad = None if grad is None else grad()

        self._restores.append(restore)


def _put_back(module: nn.Module, parameters: dict[str, Any], buffers: dict[str, Any], training: bool) -> None:
    for target, saved in ((module._parameters, parameters), (module._buffers, buffers)):
        target.clear()
        target.update(saved)
    module.training = training


def saved(value: Any) -> Callable[[], Any]:
    """Return a function that returns `value` as it is now: the same tensors and dicts, with the same contents."""
    if isinstance(value, Tensor):
        content = value.detach().clone()

        def restore() -> Tensor:
            if value.is_inference():
                with torch.inference_mode():
                    return value.copy_(content)
            value.detach().copy_(content)
            return value

        return restore
    if isinstance(value, dict):
        contents: dict[Any, Any] = value
        items = {key: saved(one) for key, one in contents.items()}

        def refill() -> dict[Any, Any]:
            contents.clear()
            contents.update({key: one() for key, one in items.items()})
            return contents

        return refill
    kept = copy.deepcopy(value) if isinstance(value, list | set) else value
    return lambda: copy.deepcopy(kept) if isinstance(kept, list | set) else kept


def restorer(one: Any) -> Restore | None:
    """Return a function that puts an object back as it is now; None where nobody can."""
    if isinstance(one, torch.Generator):
        return functools.partial(one.set_state, one.get_state())
    if isinstance(one, random.Random):
        return functools.partial(one.setstate, one.getstate())
    if hasattr(one, "bit_generator"):
        return functools.partial(setattr, one.bit_generator, "state", copy.deepcopy(one.bit_generator.state))
    if type(one).__module__ == "numpy" and hasattr(one, "flags"):
        return functools.partial(one.__setitem__, ..., one.copy())
    if isinstance(one, type) or not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
        suppressed("an object of the step could not be copied")
        return None
    content = copy.deepcopy(one.state_dict())
    return lambda: one.load_state_dict(copy.deepcopy(content))
