"""Watched calls inside torch.compile.

Dynamo, the part of torch.compile that reads Python code, goes from a module straight to its `forward`, past the slot.
`follow_watched_calls` makes it put operators into the graph where watched modules are called (operators.py). The
operators run in the order of the calls. Each finds its recorder by number, reads tensors, makes a frame and
raises as a call in the interpreter does (csrc/recorder/call_recorder_compiled.cpp).

With `mode="reduce-overhead"` Inductor cuts a graph at operators on the host, and captures the parts between the cuts
into CUDA graphs. The operators of watched calls cut the graph at every call, because they declare to write `sequence`,
a number in host memory.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from types import CodeType
from typing import Any

import torch
from torch import nn

from ...util.imports import when_imported
from ...util.visible import warn_user
from .. import slot
from ..slot import ATTRIBUTE, HOLDS_METHODS, wrappers
from .operators import NOBODY, Site, given_leaves, output_leaves, own_leaves, put_begin, put_record

_DYNAMO = "torch._dynamo"

_installed = False
_warned = False
# Code that Dynamo followed before: its graphs have no guard by which Dynamo notices a watch that begins later.
_unexpecting: weakref.WeakSet[CodeType] = weakref.WeakSet()


def follow_watched_calls(interpreted: Iterable[Any]) -> None:
    """Make Dynamo see watched modules: at once, or when it is imported, which takes a second and may never happen.

    Dynamo does not compile the functions `interpreted`, which make watched calls without the compiled part. Code that
    was compiled before is compiled again at its next call.
    """
    global _installed
    if not _installed:
        _installed = True
        when_imported(_DYNAMO, lambda: _change_dynamo(interpreted))
    if _unexpecting:
        _forget_traces()


def _change_dynamo(interpreted: Iterable[Any]) -> None:
    try:
        _change_call_function(interpreted)
    except Exception as error:
        _warn(f"nothing inside torch.compile is seen with torch {torch.__version__}", error)


def _warn(what: str, error: Exception) -> None:
    global _warned
    if not _warned:
        _warned = True
        warn_user(f"nanwatch: {what} ({type(error).__name__}: {error})")


def _change_call_function(interpreted: Iterable[Any]) -> None:
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.eval_frame import skip_code
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    _unexpecting.update(code for reference in input_codes.seen if (code := reference()) is not None)
    for function in (slot._PythonCallSlot._get, *interpreted):
        skip_code(function.__code__)
    original: Any = UnspecializedNNModuleVariable.call_function

    @functools.wraps(original)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        sites: list[Site] = []
        with _Doubtful(self.value):
            sites = _sites(self, tx)
            for site in reversed(sites):
                put_begin(tx, site, given_leaves(args, kwargs))
        under_way = _under_way(tx)
        if sites:
            under_way.append(self.value)
        try:
            output = original(self, tx, args, kwargs)
        finally:
            if sites:
                under_way.pop()
        with _Doubtful(self.value):
            for site in sites:
                found = own_leaves(tx, self) + given_leaves(args, kwargs) + output_leaves(output)
                put_record(tx, site, found)
        return output

    UnspecializedNNModuleVariable.call_function = call_function  # type: ignore[method-assign]


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


def _under_way(tx: Any) -> list[nn.Module]:
    """Return the modules whose watched calls are under way in this trace, the outermost first."""
    under_way: list[nn.Module] = tx.output.__dict__.setdefault("_nanwatch_under_way", [])
    return under_way


def _sites(variable: Any, tx: Any) -> list[Site]:
    """Return a Site for every recorder that watches the module, the innermost first."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource

    module: nn.Module = variable.value
    if tx.output.export or torch.compiler.is_exporting():
        return []
    calls = _calls(module)
    if not calls:
        # Make Dynamo notice a watch that begins later.
        if getattr(module, ATTRIBUTE) is not None:
            _unexpecting.add(
                tx.output.root_tx.f_code
            )  # by ModelFinder or `module.compile()`: no guard can tell
        elif variable.source is not None:
            install_guard(AttrSource(variable.source, ATTRIBUTE).make_guard(GuardBuilder.CONSTANT_MATCH))
        return []
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return []  # values inside vmap and grad cannot be read
    sites: list[Site] = []
    wrapper = variable.var_getattr(tx, ATTRIBUTE)
    if HOLDS_METHODS:
        wrapper = wrapper.var_getattr(tx, "__self__")
    for call in calls:
        # `site` names the recorder, the module and the options. Dynamo guards on it, so its parts are constants.
        wrapper.var_getattr(tx, "site").as_python_constant()
        watch, node, parts = call.target
        caller = _caller(_under_way(tx), call)
        sequence = wrapper.var_getattr(tx, "sequence")
        sites.append(Site(sequence, watch, node, caller, type(module).__name__, parts))
        wrapper = wrapper.var_getattr(tx, "inner")
    return sites[::-1]


def _calls(module: nn.Module) -> list[Any]:
    """Return the watched calls of a module, the outermost first."""
    return [one for one in wrappers(module) if one.recorder is not None]


def _caller(under_way: list[nn.Module], call: Any) -> int:
    for module in reversed(under_way):
        for other in _calls(module):
            if other.recorder is call.recorder:
                return int(other.target[1])
    return NOBODY


def _forget_traces() -> None:
    """Drop all code that was compiled before Dynamo expected a watch, so that Dynamo traces it again.

    A model may be in the graph of any function that calls it, and behind decorators of its forward.
    """
    from torch._dynamo.eval_frame import remove_from_cache

    for code in list(_unexpecting):
        _unexpecting.discard(code)
        remove_from_cache(code)
