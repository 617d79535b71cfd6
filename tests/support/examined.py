"""Modules with a known culprit, and the examination of what goes wrong in them."""

import inspect
import linecache
from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from nanwatch.diagnosis.batch_snapshot import BatchSnapshot
from nanwatch.diagnosis.search import Diagnosis, find_operation
from nanwatch.instrumentation.execution_context import RngState
from nanwatch.recording.events import Start
from nanwatch.report.finding import Finding
from nanwatch.session.api import watch


def snapshot_of(
    module: nn.Module, args: Any, kwargs: Any, buffers: Any = MappingProxyType({}), *, draws: bool = False
) -> BatchSnapshot:
    """The start of a batch, as a recorder keeps it, with the states of random and numpy.random for `draws`."""
    others = RngState.capture(others=True).others if draws else ()
    return BatchSnapshot.of(Start.of(0, module, args, kwargs, (buffers, others)))


def look(model: nn.Module, *args: Any, **kwargs: Any) -> tuple[Finding, Diagnosis]:
    """Watch one batch, then examine what was found."""
    torch.manual_seed(5)
    start = snapshot_of(model, args, kwargs)
    with watch(model, on_nonfinite="record") as w:
        model(*args, **kwargs)
    finding = w.report().finding
    return finding, find_operation(start, finding, model=model)


def culprit(function: Callable[..., Any]) -> str:
    """The line of the function that its author marked."""
    lines, first = inspect.getsourcelines(function)
    (line,) = [first + i for i, text in enumerate(lines) if "# culprit" in text]
    return f"{inspect.getsourcefile(function)}:{line}"


def comment_of(finding: Finding) -> str:
    """The comment at the end of the line that the finding names."""
    return linecache.getline(finding.place.file, finding.place.line).rpartition("# ")[2].strip()


def exponential(x: Tensor) -> Tensor:
    return torch.exp(x * 100)  # culprit aten.exp.default
