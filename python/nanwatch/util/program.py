"""The user's program: its files, frames and imports, and the modules and parameters of its model."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from inspect import CO_OPTIMIZED
from pathlib import Path
from types import CodeType, FrameType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

# With the separator: torchvision is not torch.
SKIPPED_FILES = (
    f"{Path(torch.__file__).parent}{os.sep}",
    f"{Path(__file__).parents[1]}{os.sep}",
    contextlib.__file__,
    functools.__file__,
)

# References to a frame's copy of its locals where nobody else has it. Before Python 3.13 `f_locals` returns that copy.
_OF_FRAME = 3


@functools.lru_cache(4096)
def names_of(code: CodeType) -> frozenset[str]:
    """Return the globals and attributes that this code and the functions defined inside it mention."""
    inner = (names_of(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(code.co_names).union(*inner)


def frame_values(frame: FrameType) -> dict[str, Any]:
    """Return the names of a frame with their values, and leave no copy of them with the frame."""
    values = frame.f_locals
    copy = dict(values)
    is_copy = frame.f_code.co_flags & CO_OPTIMIZED and type(values) is dict
    if is_copy and sys.getrefcount(values) == _OF_FRAME:
        values.clear()
    return copy


_LIBRARIES = (f"{os.path.dirname(os.__file__)}{os.sep}", *SKIPPED_FILES, "<frozen ")
_INSTALLED = re.compile(r"[\\/](site|dist)-packages[\\/]")


@functools.lru_cache(1024)
def is_library(filename: str) -> bool:
    """Return whether the file belongs to Python, torch or an installed package, not to the program."""
    return filename.startswith(_LIBRARIES) or _INSTALLED.search(filename) is not None


def when_imported(name: str, action: Callable[[], object]) -> Callable[[], None]:
    """Do `action` now if the module of that name is imported, else as soon as it is.

    Return a function that stops the waiting. It does nothing where there is nothing to wait for.
    """

    def find_spec(wanted: str, path: Any = None, target: ModuleType | None = None) -> Any:
        # The import system asks for each module that is new.
        if wanted != name:
            return None
        cancel()
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                action()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec

    def cancel() -> None:
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)

    finder: Any = SimpleNamespace(find_spec=find_spec)
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, finder)
    return cancel


# Modules and parameters, also while another thread registers more: `list` copies a dict in one step.


def each_module(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module of the tree once, with its path, in the order of `root.named_modules()`."""
    seen, left = set[int](), [("", root)]
    while left:
        path, module = left.pop()
        if id(module) not in seen:
            seen.add(id(module))
            yield path, module
            children = [(key, child) for key, child in list(module._modules.items()) if child is not None]
            left += [(f"{path}.{key}" if path else key, child) for key, child in reversed(children)]


def each_parameter(root: nn.Module) -> Iterator[Tensor]:
    """Yield each parameter of the tree once, in the order of `root.parameters()`."""
    tensors = (x for _, module in each_module(root) for x in list(module._parameters.values()))
    yield from {id(x): x for x in tensors if x is not None}.values()


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """Return the parameters in all groups of an optimizer, none of one whose constructor has not ended."""
    return [x for group in getattr(optimizer, "param_groups", ()) for x in group["params"]]


def is_in(module: str, above: str) -> bool:
    """Return whether a module is the other one or inside it, by their names."""
    return not above or f"{module}.".startswith(f"{above}.")


def nodes_behind(tensors: Iterable[Tensor]) -> list[Any]:
    """Return the nodes of the graph that made these tensors, each once."""
    nodes, left = dict[Any, None](), [x.grad_fn for x in tensors]
    for node in left:
        if node is not None and node not in nodes:
            nodes[node] = None
            left += [following for following, _ in node.next_functions]
    return list(nodes)
