"""A program, its run, and the truth about its failure, written by hand."""

from __future__ import annotations

import functools
import inspect
import re
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

import nanwatch

CASES: list[Case] = []
THREADS: list[Case] = []
PRODUCTS = "addmm mm bmm baddbmm matmul linear"  # the ways to one matrix product


def finite(value: Any) -> bool:
    """Return whether all tensors in a value are finite."""
    return all(bool(x.isfinite().all()) for x in _pytree.tree_leaves(value) if isinstance(x, Tensor))


def sequence(**modules: nn.Module) -> nn.Sequential:
    """Return the modules one after the other, under these names."""
    return nn.Sequential(OrderedDict(modules))


def loss_by(criterion: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the objective that a criterion makes of the model's output and the rest of the batch."""
    return lambda model, x, *rest: criterion(model(x), *rest)


def train_one_step(
    model: nn.Module, batch: tuple[Any, ...], objective: Callable[..., Tensor], scale: float
) -> list[Tensor]:
    """Train a model as a loop of a user's does. Return the loss and the gradients."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    optimizer.zero_grad()
    loss = objective(model, *batch)
    (loss * scale).backward()
    results = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    optimizer.step()
    return results


@dataclass
class Setup:
    """A model and one call of it, or a `loop` of several calls. With a `loss` it is trained for some `steps`."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    loop: Callable[[], Any] | None = None
    loss: Callable[[Any], Tensor] | None = None
    objective: Callable[..., Tensor] | None = None  # in place of `loss`: of the model and its arguments
    steps: int = 1
    scale: float = 1.0
    convert: Callable[[Tensor], Tensor] = lambda x: x

    def run(self) -> Any:
        """Make the calls until a step is not finite. Return the last output, or the loss and the gradients."""
        if self.loop is not None:
            return self.loop()
        if self.objective is not None:
            batch = _pytree.tree_map_only(Tensor, self.convert, self.args)
            with nullcontext() if self.autocast is None else torch.autocast("cpu", dtype=self.autocast):
                return train_one_step(self.model, batch, self.objective, self.scale)
        if self.loss is None:
            return self._forward()
        optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        for _ in range(self.steps):
            optimizer.zero_grad()
            output = self._forward()
            loss = self.loss(output)
            (loss * self.scale).backward()
            results = [
                loss.detach(),
                *(p.grad.clone() for p in self.model.parameters() if p.grad is not None),
            ]
            optimizer.step()  # where a watch raises for a gradient
            if not finite(results):
                break
        return results

    def _forward(self) -> Any:
        args, kwargs = _pytree.tree_map_only(Tensor, self.convert, (self.args, self.kwargs))
        with nullcontext() if self.autocast is None else torch.autocast("cpu", dtype=self.autocast):
            return self.model(*args, **kwargs)

    def in_format(self, dtype: torch.dtype) -> Setup:
        """Return the same program with its weights and inputs in another format, and without autocast."""
        self.model.to(dtype)
        self.convert = lambda x: x.to(dtype) if x.is_floating_point() else x
        self.autocast = None
        return self


Maker = Callable[[], Setup]


@dataclass(frozen=True)
class Case:
    """A program that fails, and the truth about it. The docstring of a program says why it fails.

    `module`, `label`, `origin`, `source_module` and `value` are those of the finding. `operations`: the names of the
    operation that made the value, any of which will do; empty where none of the failing call did. The guilty line
    ends with a comment `# culprit: NAME`. With a `label` of "" only the module is known: `module` is the one whose
    code is at fault, "-" for code outside all modules. A module of None is not known: of a training from a public
    thread the line and the cures are judged.
    """

    name: str
    make: Maker
    file: Path
    module: str | None = None
    label: str = "output"
    origin: str = "produced"
    value: str = "nan"
    source_module: str | None = None
    operations: tuple[str, ...] = ()
    transient: bool = False

    def build(self) -> Setup:
        """Make the same model and inputs each time. Leave the random state as `run` is to find it."""
        torch.manual_seed(0)
        return self.make()

    @property
    def line(self) -> int:
        """Return the number of the guilty line, read from the file."""
        marks = ("# culprit", f"# culprit: {self.name}")
        lines = enumerate(self.file.read_text().splitlines(), 1)
        (number,) = (number for number, line in lines if line.endswith(marks))
        return number


def failure(*, operations: str = "", **truth: Any) -> Callable[[Maker], Maker]:
    """Enter the function that makes the failing program into CASES under its own name. `truth`: fields of Case."""

    def enter(make: Maker) -> Maker:
        file = Path(inspect.getfile(make))
        CASES.append(Case(make.__name__, make, file, operations=tuple(operations.split()), **truth))
        return make

    return enter


def thread(place: str) -> Callable[[Callable[[], tuple[nn.Module, tuple[Any, ...], Any]]], Maker]:
    """Enter the function that builds a training of a public thread on GitHub into THREADS under its own name."""

    def enter(build: Callable[[], tuple[nn.Module, tuple[Any, ...], Any]]) -> Maker:
        @functools.wraps(build)
        def make() -> Setup:
            model, args, objective = build()
            return Setup(model, args, objective=objective)

        THREADS.append(Case(build.__name__, make, Path(inspect.getfile(build))))
        return make

    return enter


def follow(what: str, setup: Setup) -> bool:
    """Do what the words of a cure say that is no change of a line. Return whether they are known."""
    model, known = setup.model, False
    for code in re.findall(r"nanwatch\.run_in_fp32\([^,]*?(?:, cast_output=False)?\)(?=,|$)", what):
        eval(code, {"nanwatch": nanwatch, "model": model})
        known = True
    if "torch.autocast(" in what and "bfloat16" in what:
        setup.autocast, known = torch.bfloat16, True
    if "model.to(torch.bfloat16)" in what:
        setup.in_format(torch.bfloat16)
        known = True
    if limit := re.search(r"clamp the (input|output) of (?:`(.*)`|the model) to ±(\S+?)(?=,|$)", what):
        end, module = float(limit[3]), model.get_submodule(limit[2] or "")
        if limit[1] == "input":
            module.register_forward_pre_hook(lambda _, a: (a[0].clamp(-end, end), *a[1:]))
        else:
            module.register_forward_hook(lambda _, args, output: output.clamp(-end, end))
        known = True
    if option := re.search(r" (?:a|loss's) (\w+) with (\w+)=(\S+?)(?=,|$)", what):
        for module in model.modules():
            if type(module).__name__ == option[1]:
                setattr(module, option[2], eval(option[3]))
                known = True
    if factor := re.search(r"a loss scale that is (\S+) times smaller", what):
        setup.scale, known = 1 / float(factor[1]), True
    return known
