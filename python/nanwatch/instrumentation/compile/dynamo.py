"""Watched calls inside torch.compile.

Dynamo, the part of torch.compile that reads Python code, goes from a module straight to its `forward`, past the slot.
`follow_watched_calls` makes it put an operator into the graph where watched modules are called (operators.py). The
operators run in the order of the calls. Each finds the recorders of its module, reads tensors, makes a frame and raises
as a call in the interpreter does (csrc/recorder/call_recorder_compiled.cpp).

Dynamo guards on no watch, module or option where the graph has the operator. A graph without it has a guard for each
module: that nobody watches it. Graphs that were made before Dynamo was changed here get one guard for all.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from ...numerics import _extension
from ...util.imports import WhenImported, when_imported
from ...util.modules import WeakIdentityDict, each_module
from ...util.visible import warn_user
from .. import slot
from ..slot import IS_WATCHED, SITE, needs_operators, watching_at
from .operators import put_begin, put_record

_DYNAMO = "torch._dynamo"

_installed = False
_waiting: WhenImported | None = None
_original: Any = None  # Dynamo's function while another is in its place
_is_needed = False  # by graphs
_warned = False
_num_watches = 0
# How many watches had begun when a model was found to have no watched module.
_unwatched: WeakIdentityDict[int] = WeakIdentityDict()


def follow_watched_calls(interpreted: Iterable[Any]) -> None:
    """Make Dynamo see watched modules: at once, or when it is imported, which takes a second and may never happen.

    Dynamo does not compile the functions `interpreted`, which make watched calls without the compiled part.
    """
    global _installed, _num_watches, _waiting
    _num_watches += 1
    if not _installed:
        _installed = True
        _waiting = when_imported(_DYNAMO, lambda: _change_dynamo(interpreted))


def leave() -> bool:
    """Leave Dynamo as it was found, and return True, unless a graph has operators or guards of nanwatch."""
    global _installed, _original
    if _is_needed:
        return False
    if _waiting is not None:
        _waiting.cancel()
    if _original is not None:
        from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

        UnspecializedNNModuleVariable.call_function = _original  # type: ignore[method-assign]
        _original = None
    _installed = False
    return True


def _change_dynamo(interpreted: Iterable[Any]) -> None:
    try:
        _change_call_function(interpreted)
    except Exception as error:
        _warn(f"nothing inside torch.compile is seen with torch {torch.__version__}", error)


def _warn(what: str, error: Exception | None = None) -> None:
    global _warned
    if not _warned:
        _warned = True
        warn_user(f"nanwatch: {what}" + (f" ({type(error).__name__}: {error})" if error is not None else ""))


def _change_call_function(interpreted: Iterable[Any]) -> None:
    from torch._dynamo.eval_frame import skip_code
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    for function in (slot._PythonCallSlot._get, *interpreted):
        skip_code(function.__code__)
    global _original
    _original = original = UnspecializedNNModuleVariable.call_function

    @functools.wraps(original)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        global _is_needed
        if _extension.C is None:
            if watching_at(id(self.value)):
                _warn(f"calls inside torch.compile need the compiled part: {_extension.reason}")
            return original(self, tx, args, kwargs)
        _is_needed = True
        callers, site = _callers(tx), None
        with _Doubtful(self.value):
            site = _site(self, tx)
            if site is not None and not callers:
                put_begin(tx, site, args, kwargs)
        if site is None:
            return original(self, tx, args, kwargs)
        callers.append(site)
        try:
            output = original(self, tx, args, kwargs)
        finally:
            callers.pop()
        with _Doubtful(self.value):
            put_record(tx, site, callers[-1] if callers else None, self, args, kwargs, output)
        return output

    UnspecializedNNModuleVariable.call_function = call_function  # type: ignore[method-assign]
    if _extension.C is not None:
        _guard_older_graphs()


class _Doubtful:
    """Context that turns an error into a warning: an unseen module does less harm than a model that cannot compile."""

    def __init__(self, module: nn.Module) -> None:
        self._class_name = type(module).__name__

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        from torch._dynamo.exc import TorchDynamoException

        if not isinstance(error, Exception) or isinstance(error, TorchDynamoException):
            return False  # by which Dynamo itself restarts, or leaves code to the interpreter
        _warn(f"the calls of {self._class_name} inside torch.compile are not seen", error)
        return True


def _callers(tx: Any) -> list[Any]:
    """Return the sites of the modules whose calls are under way in this trace, the outermost first."""
    callers: list[Any] = tx.output.__dict__.setdefault("_nanwatch_callers", [])
    return callers


def _site(variable: Any, tx: Any) -> Any:
    """Return Dynamo's variable for the site of the module, or None if its calls need no operator."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.base import VariableTracker

    module: nn.Module = variable.value
    if tx.output.export or torch.compiler.is_exporting() or variable.source is None:
        return None
    if not needs_operators(module):
        install_guard(AttrSource(variable.source, IS_WATCHED).make_guard(GuardBuilder.CONSTANT_MATCH))
        return None
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return None  # values inside vmap and grad cannot be read
    return VariableTracker.build(tx, getattr(module, SITE), AttrSource(variable.source, SITE))


def _guard_older_graphs() -> None:
    """Make the graphs that were compiled before notice a call that reaches a watched module."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.convert_frame import input_codes

    global _is_needed
    for code in [code for reference in input_codes.seen if (code := reference()) is not None]:
        for entry in _debug_get_cache_entry_list(code):
            manager = entry.guard_manager
            scope = (manager.global_scope or {}).get("G", {})
            guard = functools.partial(_reaches_no_watch, code, scope)
            _is_needed = True
            manager.root.add_lambda_guard(guard, ["nanwatch: a watched module is called"], None)


def _reaches_no_watch(code: CodeType, scope: dict[str, Any], variables: dict[str, Any]) -> bool:
    values = [*variables.values(), *(scope.get(name) for name in code.co_names)]
    return not any(_holds_watched(module) for value in values for module in _modules_of(value))


def _modules_of(value: Any) -> Iterator[nn.Module]:
    """Yield the modules that code finds in a variable: itself, in a container, or in an object."""
    if isinstance(value, MethodType):
        value = value.__self__
    if isinstance(value, nn.Module):
        yield value
    elif not isinstance(value, (type, ModuleType, FunctionType)):
        values = value if isinstance(value, (dict, list, tuple)) else getattr(value, "__dict__", ())
        values = values.values() if isinstance(values, dict) else values
        yield from (module for module in list(values) if isinstance(module, nn.Module))


def _holds_watched(model: nn.Module) -> bool:
    if _unwatched.get(model) == _num_watches:
        return False
    is_watched = any(getattr(module, IS_WATCHED) for _, module in each_module(model))
    if not is_watched:
        _unwatched[model] = _num_watches
    return is_watched
