"""A failing model: how to make it fail, and the truth about it, written by hand."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

CASES: list[Case] = []
PRODUCTS = "addmm mm bmm baddbmm matmul linear"  # the ways to one matrix product


@dataclass
class Setup:
    """A model and the call that fails, or a `loop` of several calls of which the last fails."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    loop: Callable[[], None] | None = None

    def run(self) -> None:
        """Make the calls."""
        if self.loop is not None:
            self.loop()
            return
        with nullcontext() if self.autocast is None else torch.autocast("cpu", dtype=self.autocast):
            self.model(*self.args, **self.kwargs)

    def in_float32(self) -> Setup:
        """The same one call, all of it in float32."""
        assert self.loop is None, "a loop is not one call"

        def widen(x: Any) -> Any:
            return x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

        args, kwargs = _pytree.tree_map(widen, (self.args, self.kwargs))
        return Setup(copy.deepcopy(self.model).float(), args, kwargs)


@dataclass(frozen=True)
class Case:
    """A failing model and the truth about it.

    `module`, `label`, `origin`, `source_module` and `value` are those of the finding. `operations`: the names of the
    operation that made the value, any of which will do, the usual one first; empty where none of the failing call did.
    The guilty line of `file` ends with a comment that names the case; where the guilty module is one of torch's, it is
    the line that calls it. `format_cause`: the same call in float32 is finite. `cause` is its row of docs/failures.md.
    """

    name: str
    make: Callable[[], Setup]
    file: Path
    cause: str
    module: str
    label: str
    origin: str
    value: str
    source_module: str | None
    operations: tuple[str, ...]
    transient: bool
    format_cause: bool

    def build(self) -> Setup:
        """The same model and inputs each time. Leaves the random state as `run` is to find it."""
        torch.manual_seed(0)
        return self.make()

    @property
    def line(self) -> int:
        """The number of the guilty line, read from the file."""
        found = [
            number
            for number, line in enumerate(self.file.read_text().splitlines(), 1)
            if line.endswith(f"# culprit: {self.name}")
        ]
        if len(found) != 1:
            raise ValueError(f"{self.file.name} should have one line marked for {self.name}, got {found}")
        return found[0]


def failure(
    cause: str,
    *,
    module: str,
    label: str = "output",
    origin: str = "produced",
    value: str = "nan",
    source_module: str | None = None,
    operations: str = "",
    transient: bool = False,
    format_cause: bool = False,
) -> Callable[[Callable[[], Setup]], Callable[[], Setup]]:
    """Enter the function that makes the failing model into CASES; its name is the name of the case."""

    def enter(make: Callable[[], Setup]) -> Callable[[], Setup]:
        CASES.append(
            Case(
                name=make.__name__,
                make=make,
                file=Path(inspect.getfile(make)),
                cause=cause,
                module=module,
                label=label,
                origin=origin,
                value=value,
                source_module=source_module,
                operations=tuple(operations.split()),
                transient=transient,
                format_cause=format_cause,
            )
        )
        return make

    return enter
