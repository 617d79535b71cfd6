"""How torch.compile is made to see that a module is watched.

Dynamo, the part of torch.compile that reads Python code, goes from a module straight to its `forward`: to watch a
module does not change what it reads. `install` makes it put operators into the graph where watched modules are called
(dynamo_values.py). They run in the order of the calls; each finds its recorder by number (_live.py), looks, makes its
frame and raises as a call in the interpreter does (csrc/recorder/call_recorder_compiled.cpp).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch
from torch import nn

from ...util._when_imported import when_imported
from ...util.user_warning import warn_user
from ._live import NOBODY
from .cuda_graphs import captured_on
from .dynamo_values import Site, device_of, given_leaves, output_leaves, own_leaves, put_begin, put_record

_DYNAMO = "torch._dynamo"

_installed = False
_warned = False
# Code whose graphs have no guard which tells Dynamo that a module is watched now, as Dynamo followed it before.
_unexpecting: weakref.WeakSet[CodeType] = weakref.WeakSet()


def install(interpreted: Callable[..., Any]) -> None:
    """Make Dynamo see watched modules: at once, or when it is imported, which takes a second and may never happen.

    `interpreted` makes watched calls where there is no compiled part; Dynamo is not to compile it.
    What was compiled before that is compiled again when it is called next.
    """
    global _installed
    if not _installed:
        _installed = True
        when_imported(_DYNAMO, lambda: _change_dynamo(interpreted))
    if _unexpecting:
        _forget_traces()


def _change_dynamo(interpreted: Callable[..., Any]) -> None:
    try:
        _follow_watched_calls(interpreted)
    except Exception as error:
        _warn(f"nothing inside torch.compile is seen with torch {torch.__version__}", error)


def _warn(what: str, error: Exception) -> None:
    global _warned
    if not _warned:
        _warned = True
        warn_user(f"nanwatch: {what} ({type(error).__name__}: {error})")


def _follow_watched_calls(interpreted: Callable[..., Any]) -> None:
    from torch._dynamo.convert_frame import input_codes
    from torch._dynamo.eval_frame import skip_code
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    from ...recording.recorder import PythonRecorder as Recorder
    from .. import links

    _unexpecting.update(code for reference in input_codes.seen if (code := reference()) is not None)
    # The interpreter's own way through a watched module, where there is no compiled part, is not to be compiled itself.
    paused: Any = vars(Recorder)["paused"]
    called = Recorder.enter, Recorder.leave, Recorder.left_by, Recorder._add, paused.fget
    for function in (links._PythonPlace._get, interpreted, *called):
        skip_code(function.__code__)
    original: Any = UnspecializedNNModuleVariable.call_function

    @functools.wraps(original)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        sites: list[Site] = []
        with _Doubtful(self.value):
            sites = _sites(self, tx, args, kwargs)
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
    """Where Dynamo is not as expected: a module that is not seen does less harm than a model that does not compile."""

    def __init__(self, module: nn.Module) -> None:
        self._class_name = type(module).__name__

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        from torch._dynamo.exc import TorchDynamoException

        if not isinstance(error, Exception) or isinstance(error, TorchDynamoException):
            return False  # which is how Dynamo itself starts anew, or leaves code to the interpreter
        _warn(f"the calls of {self._class_name} inside torch.compile are not seen", error)
        return True


def _under_way(tx: Any) -> list[nn.Module]:
    """The watched calls that this trace is inside of, outermost first."""
    under_way: list[nn.Module] = tx.output.__dict__.setdefault("_nanwatch_under_way", [])
    return under_way


def _sites(variable: Any, tx: Any, args: Any, kwargs: Any) -> list[Site]:
    """A Site for every recorder that watches the module, the innermost first."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource

    from ..links import ATTRIBUTE, HOLDS_METHODS

    module: nn.Module = variable.value
    if tx.output.export or torch.compiler.is_exporting():
        return []
    calls = _calls(module)
    if not calls:
        # So that a watch that begins later is noticed.
        if getattr(module, ATTRIBUTE) is not None:
            _unexpecting.add(
                tx.output.root_tx.f_code
            )  # by Outermost or `module.compile()`: no guard can tell
        elif variable.source is not None:
            install_guard(AttrSource(variable.source, ATTRIBUTE).make_guard(GuardBuilder.CONSTANT_MATCH))
        return []
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return []  # values inside vmap and grad cannot be looked at
    sites: list[Site] = []
    devices = _devices(tx)
    place = variable.var_getattr(tx, ATTRIBUTE)
    if HOLDS_METHODS:
        place = place.var_getattr(tx, "__self__")
    for call in calls:
        # `site` says which recorder, module and options this is. It is guarded on; what is in it are constants.
        place.var_getattr(tx, "site").as_python_constant()
        watch, node, parts = call.place
        caller = _caller(_under_way(tx), call)
        sequence, outside = place.var_getattr(tx, "sequence"), None
        is_first = watch not in devices
        device = (
            captured_on(tx, call.recorder, _devices_of(module, args, kwargs)) if is_first else devices[watch]
        )
        if device is not None:
            call.attachment().put_sequence(call, device)
            outside = sequence if is_first else None
            sequence = place.var_getattr(tx, "device_sequence")
        devices[watch] = device
        sites.append(Site(sequence, outside, device, watch, node, caller, type(module).__name__, parts))
        place = place.var_getattr(tx, "inner")
    return sites[::-1]


def _calls(module: nn.Module) -> list[Any]:
    """The watched calls before the module's call, the outermost first."""
    from ..links import chain

    return [link for link in chain(module) if link.recorder is not None]


def _devices(tx: Any) -> dict[int, torch.device | None]:
    """Of each watch in this trace the device that it will be captured on, if it will be."""
    devices: dict[int, torch.device | None] = tx.output.__dict__.setdefault("_nanwatch_devices", {})
    return devices


def _devices_of(module: nn.Module, args: Any, kwargs: Any) -> Iterator[torch.device]:
    """Those of the module's weights and of the tensors that it is given."""
    yield from {x.device for x in module.parameters()}
    for leaf in given_leaves(args, kwargs):
        if (device := device_of(leaf)) is not None:
            yield device


def _caller(under_way: list[nn.Module], call: Any) -> int:
    for module in reversed(under_way):
        for other in _calls(module):
            if other.recorder is call.recorder:
                return int(other.place[1])
    return NOBODY


def _forget_traces() -> None:
    """Drop what was compiled before Dynamo expected a watch: it is traced anew.

    All of it: a model may be in the graph of any function that calls it, and behind decorators of its forward.
    """
    from torch._dynamo.eval_frame import remove_from_cache

    for code in list(_unexpecting):
        _unexpecting.discard(code)
        remove_from_cache(code)
