"""Watched calls inside torch.compile: one operator in the graph after each call of a watched module.

Dynamo, the part of torch.compile that reads Python code, goes from a module straight to its `forward`, past the slot.
`follow_watched_calls()` makes it put an operator into the graph where watched modules are called. The operators run in
the order of the calls. Each finds the recorders of its module, reads tensors, makes a frame and raises as a call in the
interpreter does (csrc/recorder/call_recorder_compiled.cpp).

A graph holds no Python objects, and a constant in it would make Dynamo compile each layer anew. So the operator takes
the site of a module (slot.py), a tensor that Dynamo makes an input of the graph. The wrappers of the module know its
recorders. Without a wrapper the operator does nothing, and the graph serves the next watch. Dynamo guards on no watch,
module or option where the graph has the operator. A graph without it has a guard for each module: that nobody watches
it. Graphs that were made before Dynamo was changed here get one guard for all.

Dynamo's variables stand for the values of a call while it traces. `_Plan` makes containers of them for the walk in
recording/walk.py. To let Dynamo trace that walk doubled the time to trace GPT-2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..numerics import _extension
from ..recording.events import Settings
from ..recording.observe import call_values
from ..recording.recorder import PythonRecorder
from ..recording.walk import MAX_DEPTH, MAX_LEAVES, SCALARS, Leaf, Unwalked, call_leaves, leaves
from ..util.messages import warn_user
from ..util.program import each_module
from .global_hooks import Changes
from .slot import IS_WATCHED, SITE, _PythonCallSlot, needs_operators, watching

_DYNAMO = "torch._dynamo"
# Functions of the slot and its wrappers that Dynamo leaves to the interpreter.
SKIPPED: list[Callable[..., Any]] = [_PythonCallSlot._get]

_is_needed = False  # by graphs
_warned = False
_num_watches = 0
# How many watches had begun when a model was found to have no watched module.
_unwatched = WeakIdKeyDictionary()


def follow_watched_calls() -> None:
    """Make Dynamo see watched modules: at once, or when it is imported, which takes a second and may never happen."""
    global _num_watches
    _num_watches += 1
    dynamo.make()


def leave() -> bool:
    """Leave Dynamo as it was found, and return True, unless a graph has operators or guards of nanwatch."""
    if not _is_needed:
        dynamo.undo()
    return not _is_needed


def _change_dynamo() -> None:
    try:
        from torch._dynamo.eval_frame import skip_code
        from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

        for function in SKIPPED:
            skip_code(function.__code__)
        for name in ("enter", "leave"):
            dynamo.replace(PythonRecorder, name, torch.compiler.disable(getattr(PythonRecorder, name)))
        original = UnspecializedNNModuleVariable.call_function
        dynamo.replace(UnspecializedNNModuleVariable, "call_function", _following(original))
        if _extension.C is not None:
            _guard_older_graphs()
    except Exception as error:
        _warn(f"nothing inside torch.compile is seen with torch {torch.__version__}", error)


dynamo = Changes(_DYNAMO, _change_dynamo)


def _warn(what: str, error: Exception | None = None) -> None:
    global _warned
    if not _warned:
        _warned = True
        warn_user(f"nanwatch: {what}" + (f" ({type(error).__name__}: {error})" if error is not None else ""))


def _following(original: Any) -> Any:
    """Return a function in the place of Dynamo's, which traces a call of a module."""

    @functools.wraps(original)
    def call_function(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        global _is_needed
        if _extension.C is None:
            if watching(self.value):
                _warn(f"calls inside torch.compile need the compiled part: {_extension.reason}")
            return original(self, tx, args, kwargs)
        _is_needed = True
        # The sites of the modules whose calls are under way in this trace, the outermost first.
        callers: list[Any] = tx.output.__dict__.setdefault("_nanwatch_callers", [])
        site = _attempt(_site, self, tx)
        if site is None:
            return original(self, tx, args, kwargs)
        if not callers:
            _attempt(_put, self, tx, site, None, args, kwargs)
        callers.append(site)
        try:
            output = original(self, tx, args, kwargs)
        finally:
            callers.pop()
        _attempt(_put, self, tx, site, callers[-1] if callers else None, args, kwargs, output)
        return output

    return call_function


def _attempt(step: Callable[..., Any], module: Any, *args: Any) -> Any:
    """Take a step, and warn of an error: an unseen module does less harm than a model that cannot compile."""
    try:
        return step(module, *args)
    except Exception as error:
        # By its own errors Dynamo restarts, or leaves code to the interpreter.
        if type(error).__module__.startswith(_DYNAMO):
            raise
        _warn(f"the calls of {type(module.value).__name__} inside torch.compile are not seen", error)
        return None


def _variable(tx: Any, value: Any, source: Any = None, name: str = "") -> Any:
    """Return Dynamo's variable for a constant, or for the attribute `name` of what has this source: an input."""
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.nn_module import UnspecializedNNModuleVariable

    build = UnspecializedNNModuleVariable.build  # as every class of Dynamo's variables has it
    return build(tx, value) if source is None else build(tx, value, AttrSource(source, name)).realize()


def _site(variable: Any, tx: Any) -> Any:
    """Return Dynamo's variable for the site of the module, or None if its calls need no operator."""
    module: nn.Module = variable.value
    if tx.output.export or torch.compiler.is_exporting() or variable.source is None:
        return None
    if not needs_operators(module):
        _variable(tx, getattr(module, IS_WATCHED), variable.source, IS_WATCHED)  # puts a guard on it
        return None
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return None  # values inside vmap and grad cannot be read
    return _variable(tx, getattr(module, SITE), variable.source, SITE)


def _guard_older_graphs() -> None:
    """Make the graphs that were compiled before notice a call that reaches a watched module."""
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
    from torch._dynamo.convert_frame import input_codes

    global _is_needed
    for code in [code for reference in input_codes.seen if (code := reference()) is not None]:
        for entry in _debug_get_cache_entry_list(code):
            manager = entry.guard_manager
            scope = (manager.global_scope or {}).get("G", {})
            guard = functools.partial(_reaches_no_watch, code.co_names, scope)
            _is_needed = True
            manager.root.add_lambda_guard(guard, ["nanwatch: a watched module is called"], None)


def _reaches_no_watch(names: Iterable[str], scope: dict[str, Any], variables: dict[str, Any]) -> bool:
    values = [*variables.values(), *(scope.get(name) for name in names)]
    return not any(_holds_watched(module) for value in values for module in _modules_of(value))


def _modules_of(value: Any) -> Iterator[nn.Module]:
    """Yield the modules that code finds in a variable: itself, in a container, or in an object."""
    if isinstance(value, MethodType):
        value = value.__self__
    values: Any = [value]
    if not isinstance(value, (nn.Module, type, ModuleType, FunctionType)):
        values = value if isinstance(value, (dict, list, tuple)) else getattr(value, "__dict__", ())
    values = list(values.values() if isinstance(values, dict) else values)
    yield from (module for module in values if isinstance(module, nn.Module))


def _holds_watched(model: nn.Module) -> bool:
    if _unwatched.get(model) == _num_watches:
        return False
    is_watched = any(getattr(module, IS_WATCHED) for _, module in each_module(model))
    if not is_watched:
        _unwatched[model] = _num_watches
    return is_watched


# The operator, and its arguments.

# Between the lines of a plan. No newline: Inductor writes an operator's arguments into comments of the code that it
# makes for a GPU, as they are.
PLAN_SEPARATOR = "\x1f"

# The operator is declared to write this tensor, so that a compiler keeps all calls and their order.
SEQUENCE = torch.zeros(1, dtype=torch.int64, device="cpu")


def _record(*arguments: Any) -> None:
    """Call the kernel of the compiled part, which is registered for CPU and CUDA, with tensors of other devices."""
    record_.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *arguments)  # type: ignore[attr-defined]


# No argument may be called `node` or `self`: Inductor passes an operator's arguments by name, beside those names.
# The fake does nothing, as no code reads the count in `sequence`.
record_ = _extension.define(
    "record_(Tensor(a!) sequence, Tensor site, Tensor? caller, str plan, Tensor[] tensors) -> ()",
    _record,
    lambda *_: None,
)


_NOT_READ = Unwalked("in compiled code only plain tensors are read")
_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)
_OPAQUE = ""  # for any value that is neither a container nor a tensor
_OWNED = Settings(inputs=False, outputs=False)


def _put(module: Any, tx: Any, site: Any, caller: Any, args: Any, kwargs: Any, *outputs: Any) -> None:
    """Put the operator into the graph: after a call with its output, or before one that no call of the graph made.

    `caller` is the site of the module that made the call, or None.
    """
    plan = _Plan(tx, type(module.value).__name__ if outputs else "")
    for role, name, x in call_values(_OWNED, module.value, (), {}, None) if outputs else ():
        plan.add(role[0], [(name, module.var_getattr(tx, name).realize() if _is_plain(x) else _NOT_READ)])
    inputs = {key: plan.walkable(variable) for key, variable in kwargs.items()}
    plan.add("i", call_leaves(tuple(map(plan.walkable, args)), inputs, objects=False))
    for output in outputs:
        plan.add("o", leaves(plan.walkable(output, True), "output", False))
    sequence = _variable(tx, SEQUENCE, tx.import_source(__name__), "SEQUENCE")
    tensors = _variable(tx, [])
    tensors.items.extend(plan.tensors)
    caller = _variable(tx, None) if caller is None else caller
    text = _variable(tx, PLAN_SEPARATOR.join(plan.lines))
    _variable(tx, record_).call_function(tx, [sequence, site, caller, text, tensors], {})


class _Plan:
    """Values of a frame: a line for each (see `each_planned` in C++), and the variables of the tensors to read."""

    def __init__(self, tx: Any, class_name: str) -> None:
        self._tx = tx
        self.lines = [class_name]
        self.tensors: list[Any] = []
        # Containers by their variables, which live as long, so that no other has such an id.
        self._walkables: dict[tuple[int, bool], tuple[Any, Any]] = {}

    def add(self, role: str, values: Iterable[Leaf]) -> None:
        """Add lines of leaves."""
        for label, leaf in values:
            if isinstance(leaf, Unwalked):
                self.lines.append(f"{role}u {label}\t{leaf}")
            elif isinstance(leaf, SCALARS):
                self.lines.append(f"{role}{'n' if leaf is None else 'x'} {label}")
            else:
                self.lines.append(f"{role}t {label}")
                self.tensors.append(leaf)

    def walkable(self, variable: Any, enters_objects: bool = False, depth: int = 0) -> Any:
        """Return what the walk over values takes for the variable's: containers, scalars and variables of tensors.

        Dynamo guards on everything that it reads, and fails on some values (sparse tensors). So this reads only plain
        tensors among the values that the user's own code has not touched so far. With `enters_objects` an object that
        the traced code has made is a dictionary of its attributes. A container that is met again, as in a cycle, has
        one value for the walk.
        """
        tx = self._tx
        if not variable.is_realized():
            value = variable.original_value()
            if not _is_harmless(value, MAX_DEPTH):
                is_read = isinstance(value, Tensor | list | tuple | dict) or is_dataclass(value)
                return _NOT_READ if is_read else _OPAQUE
        variable = variable.realize()
        kind = variable.python_type()
        if issubclass(kind, Tensor):
            is_plain = kind in _PLAIN_TENSORS and getattr(variable, "layout", None) is torch.strided
            return variable if is_plain else _NOT_READ
        if (id(variable), enters_objects) in self._walkables:
            return self._walkables[id(variable), enters_objects][1]
        pairs: list[tuple[Any, Any]]
        if issubclass(kind, tuple | list):
            pairs = list(enumerate(variable.unpack_var_sequence(tx)))
        elif issubclass(kind, dict):
            items = variable.call_method(tx, "items", [], {}).unpack_var_sequence(tx)
            named = enumerate(item.unpack_var_sequence(tx) for item in items)
            pairs = [(_constant(key, (key.python_type().__name__, i)), x) for i, (key, x) in named]
        elif is_dataclass(kind):
            pairs = [(field.name, variable.var_getattr(tx, field.name)) for field in fields(kind)]
        else:
            pairs = self._attributes(variable) if enters_objects else []
            if not pairs:
                constant = _constant(variable, _OPAQUE)
                return constant if isinstance(constant, SCALARS) else _OPAQUE
        if depth > MAX_DEPTH:
            return Unwalked(f"nested deeper than {MAX_DEPTH}")
        values: Any = [None] * len(pairs) if issubclass(kind, tuple | list) else {}
        self._walkables[id(variable), enters_objects] = variable, values
        for key, x in pairs:
            values[key] = self.walkable(x, enters_objects, depth + 1)
        return values

    def _attributes(self, variable: Any) -> list[tuple[Any, Any]]:
        """Return the attributes, without numbers and texts, of an object that the traced code has made."""
        is_callable = any("__call__" in vars(kind) for kind in variable.python_type().__mro__)
        if variable.source is not None or is_callable:
            return []
        attributes = self._tx.output.side_effects.store_attr_mutations.get(variable, {})
        return [(name, x) for name, x in attributes.items() if not isinstance(_constant(x, x), SCALARS)]


def _constant(variable: Any, otherwise: Any) -> Any:
    return variable.as_python_constant() if variable.is_python_constant() else otherwise


def _is_harmless(value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return _is_plain(value)
    if isinstance(value, list | tuple | dict) and depth > 0 and len(value) <= MAX_LEAVES:
        values = value.values() if isinstance(value, dict) else value
        return all(_is_harmless(item, depth - 1) for item in values)
    return value is None


def _is_plain(x: Tensor) -> bool:
    """Return whether the operator reads `x`: it is strided, and no subclass whose own code would get the operator."""
    return type(x) in _PLAIN_TENSORS and x.layout is torch.strided
