"""A failing model loaded from source text, run with plain PyTorch, and searched for the first bad operation."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

OUTSIDE = "-"  # in place of a module's name: the loss function of the file, which no module calls


class Fault(NamedTuple):
    """An operation that makes a non-finite value: its module, its name in torch.ops.aten, its line of source."""

    module: str
    operation: str
    line: str


class Outcome(NamedTuple):
    """Outcome of a program: which values are finite after the last step that ran."""

    step: int
    forward: bool
    backward: bool


class Seen(NamedTuple):
    """The values of the last step that ran, in the order in which they were made."""

    step: int
    values: list[Tensor]
    bad: str
    loss: float

    @property
    def is_finite(self) -> bool:
        """Return whether the loss and all gradients are finite."""
        return not self.bad


class Program:
    """Source text as a module of its own."""

    def __init__(self, path: Path, text: str) -> None:
        self.file = str(path)
        self.lines = text.splitlines()
        self.names = ModuleType(path.stem)
        exec(compile(text, self.file, "exec"), self.names.__dict__)
        self.model: nn.Module = self.names.make()
        # Changes that no line of the source shows.
        self.scale = 1.0
        self.convert: Callable[[Tensor], Tensor] = lambda x: x

    def loss(self, output: Tensor) -> Tensor:
        """The file's own loss, or the sum of the output."""
        loss = self.names.loss(output) if hasattr(self.names, "loss") else output.float().sum()
        return loss if self.scale == 1 else loss * self.scale

    def batch(self, step: int) -> tuple[Any, ...]:
        """The batch of a step, each tensor converted."""
        given: tuple[Any, ...] = self.names.batch(step)
        return tuple(self.convert(x) if isinstance(x, Tensor) else x for x in given)

    def optimizer(self) -> torch.optim.Optimizer | None:
        """The file's own optimizer, if it has one."""
        return self.names.optimizer(self.model) if hasattr(self.names, "optimizer") else None

    def run(self, steps: int) -> Outcome:
        """Run step by step until a step is not finite."""
        optimizer = self.optimizer()
        for step in range(steps):
            self.model.zero_grad()
            output = self.model(*self.batch(step))
            loss = self.loss(output)
            loss.backward()
            gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
            assert gradients, "no parameter has a gradient"
            outcome = Outcome(step, _finite([output, loss]), _finite(gradients))
            if not (outcome.forward and outcome.backward):
                break
            if optimizer is not None:
                optimizer.step()
        return outcome

    def look(self, steps: int) -> Seen:
        """Run until a step is not finite. Return the values of its module calls, loss and gradients."""
        optimizer = self.optimizer()
        for step in range(steps):
            values: list[Tensor] = []
            self.model.zero_grad()
            with _Outputs(self.model, values):
                output = self.model(*self.batch(step))
            loss = self.loss(output)
            loss.backward()
            gradients = {
                f"{name}.grad": p.grad for name, p in self.model.named_parameters() if p.grad is not None
            }
            ends = {"output": output, "loss": loss, **gradients}
            bad = ", ".join(name for name, x in ends.items() if not _finite(_tensors(x)))
            if bad:
                break
            if optimizer is not None:
                optimizer.step()
        # Behind a loss that is nan a gradient may be finite and mean nothing.
        values += gradients.values() if _finite([loss]) else ()
        return Seen(step, [x.detach() for x in values], bad, float(loss.detach()))

    def faults(self, phase: str, steps: int) -> list[Fault]:
        """The operations that make the first non-finite values of the last step, in the order in which they run."""
        if steps > 1:
            self.run(steps - 1)
            optimizer = self.names.optimizer(self.model)
            optimizer.step()
            self.model.zero_grad()
        if phase == "forward":
            with _Names(self.model) as names, _Makers(self, names) as makers:
                self.loss(self.model(*self.names.batch(steps - 1)))
            found: list[Fault] = makers.found
            return found
        return self._backward_faults(steps)

    def _backward_faults(self, steps: int) -> list[Fault]:
        found: list[Fault] = []
        with torch.autograd.set_detect_anomaly(True, check_nan=False), _Tags(self.model):
            loss = self.loss(self.model(*self.names.batch(steps - 1)))
            for node in _nodes([loss]):
                node.register_hook(self._looker(node, found))
            loss.backward()
        return found

    def _looker(self, node: Any, found: list[Fault]) -> Any:
        def look(made: Iterable[Tensor | None], given: Iterable[Tensor | None]) -> None:
            if _finite(given) and not _finite(made):
                numbers = re.findall(
                    re.escape(self.file) + '", line (\\d+)', "".join(node.metadata["traceback_"])
                )
                line = self.lines[int(numbers[-1]) - 1].strip()
                found.append(Fault(node.metadata.get("module", OUTSIDE), operation_of(node.name()), line))

        return look

    def line_now(self) -> str:
        """The line of this program that runs."""
        frame: Any = sys._getframe()
        while frame is not None:
            if frame.f_code.co_filename == self.file:
                number: int = frame.f_lineno
                return self.lines[number - 1].strip()
            frame = frame.f_back
        return ""


class _Names:
    """The names of the modules whose calls are under way."""

    def __init__(self, model: nn.Module) -> None:
        self.stack: list[str] = []
        self.handles = []
        for name, module in model.named_modules():
            self.handles += [
                module.register_forward_pre_hook(lambda *_, name=name: self.stack.append(name)),
                module.register_forward_hook(self._leave),
            ]

    def _leave(self, *_: object) -> None:
        self.stack.pop()

    def __enter__(self) -> _Names:
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


class _Outputs:
    """Collects the tensors that module calls return."""

    def __init__(self, model: nn.Module, values: list[Tensor]) -> None:
        self.handles = [
            module.register_forward_hook(lambda _m, _a, output: values.extend(_tensors(output)))
            for module in model.modules()
        ]

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        for handle in self.handles:
            handle.remove()


class _Makers(TorchDispatchMode):
    """Collects the operations that make inf or nan of finite values, or nan of values without one."""

    def __init__(self, program: Program, names: _Names) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.program, self.names = program, names
        self.found: list[Fault] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x.detach().clone() for x in _tensors((args, kwargs))]
        result = function(*args, **(kwargs or {}))
        made = list(_tensors(result))
        nan = any(bool(x.isnan().any()) for x in made) and not any(bool(x.isnan().any()) for x in given)
        if nan or (_finite(given) and not _finite(made)):
            module = self.names.stack[-1] if self.names.stack else OUTSIDE
            name = function.overloadpacket.__name__.removesuffix("_")
            self.found.append(Fault(module, name, self.program.line_now()))
        return result


@contextmanager
def _Tags(model: nn.Module) -> Iterator[None]:
    """Write the innermost module of each autograd node into its metadata."""

    def tag(name: str, args: Any, kwargs: Any, output: Any) -> None:
        ends = {x.grad_fn for x in _tensors((args, kwargs))}
        for node in _nodes(_tensors(output), ends):
            node.metadata.setdefault("module", name)

    handles = [
        module.register_forward_hook(lambda _m, a, k, o, name=name: tag(name, a, k, o), with_kwargs=True)
        for name, module in model.named_modules()
    ]
    yield
    for handle in handles:
        handle.remove()


def operation_of(name: str) -> str:
    """The name in torch.ops.aten of `aten.div.Tensor`, or of the node `DivBackward0`."""
    if name.startswith("aten."):
        return name.split(".")[1].removesuffix("_")
    name = re.sub(r"Backward\d*$", "", name)
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return {"softmax": "_softmax"}.get(name, name)


def _tensors(value: Any) -> list[Tensor]:
    return [x for x in torch.utils._pytree.tree_leaves(value) if isinstance(x, Tensor)]


def _finite(tensors: Iterable[Tensor | None]) -> bool:
    return all(x is None or bool(x.isfinite().all()) for x in tensors)


def _nodes(outputs: Iterable[Tensor], ends: Iterable[Any] = ()) -> Iterator[Any]:
    left: list[Any] = [x.grad_fn for x in outputs]
    known = {None, *ends}
    while left:
        node = left.pop()
        if node not in known:
            known.add(node)
            yield node
            left += [following for following, _ in node.next_functions]
