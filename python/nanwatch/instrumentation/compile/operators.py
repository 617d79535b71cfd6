"""The operator that a watched model has in a compiled graph: its way to the recorders, and its arguments.

A graph holds no Python objects, and a constant in it would make Dynamo compile each layer anew. So the operator takes
the site of a module (slot.py), a tensor that Dynamo makes an input of the graph. The wrappers of the module know its
recorders. Without a wrapper the operator does nothing, and the graph serves the next watch. The compiled part has a
kernel of its own (csrc/recorder/call_recorder_compiled.cpp), and falls back to the one here.

Dynamo's variables stand for the values of a call while it traces. This module walks over them as recording/walk.py does
over values. To let Dynamo trace a walk in Python doubled the time to trace GPT-2.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...numerics._extension import define
from ...recording.walk import MAX_DEPTH, MAX_LEAVES, MAX_OBJECTS, MAX_SCALARS, SCALARS, spell_key
from ..slot import watching_at

NOBODY = -1  # the caller of a call that no watched call of the same graph made
# Between the lines of a plan. No newline: Inductor writes an operator's arguments into comments of the code that it
# makes for a GPU, as they are.
PLAN_SEPARATOR = "\x1f"

# The operator is declared to write this tensor, so that a compiler keeps all calls and their order.
SEQUENCE = torch.zeros(1, dtype=torch.int64, device="cpu")


def _record(
    sequence: Tensor, site: Tensor, caller: Tensor | None, plan: str, tensors: Sequence[Tensor]
) -> None:
    sequence.add_(1)
    calls = watching_at(int(site))
    if plan[:1] in ("", PLAN_SEPARATOR):  # it names no class
        for call in calls:
            call.recorder.begin_compiled(call.node, plan, list(tensors))
        return
    nodes = {} if caller is None else {id(outer.recorder): outer.node for outer in watching_at(int(caller))}
    for call in reversed(calls):
        call.recorder.record_compiled(call.node, nodes.get(id(call.recorder), NOBODY), plan, list(tensors))


def _fake_record(*_: object) -> None:
    """Do nothing: the operator counts calls in `sequence`, and no code reads that count."""


# No argument may be called `node` or `self`: Inductor passes an operator's arguments by name, among names of its own.
record_ = define(
    "record_(Tensor(a!) sequence, Tensor site, Tensor? caller, str plan, Tensor[] tensors) -> ()",
    _record,
    _fake_record,
)


_NOT_READ = "in compiled code only plain tensors are read"
_TOO_MANY = "too many values in compiled code"
_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


def put_begin(tx: Any, site: Any, args: Any, kwargs: Any) -> None:
    """Put the operator into the graph before a call that no call of the graph made."""
    plan = _Plan(tx, "")
    plan.add_inputs(args, kwargs)
    _put(tx, site, None, plan)


def put_record(tx: Any, site: Any, caller: Any, module: Any, args: Any, kwargs: Any, output: Any) -> None:
    """Put the operator into the graph after a call. `caller` is the site of the module that made it, or None."""
    plan = _Plan(tx, type(module.value).__name__)
    plan.add_own(module)
    plan.add_inputs(args, kwargs)
    plan.add_output(output, [*args, *kwargs.values()])
    _put(tx, site, caller, plan)


def _put(tx: Any, site: Any, caller: Any, plan: _Plan) -> None:
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import ListVariable
    from torch._dynamo.variables.base import VariableTracker

    sequence = VariableTracker.build(tx, SEQUENCE, AttrSource(tx.import_source(__name__), "SEQUENCE"))
    caller = VariableTracker.build(tx, None) if caller is None else caller
    text = VariableTracker.build(tx, PLAN_SEPARATOR.join(plan.lines))
    arguments = [sequence, site, caller, text, ListVariable(plan.tensors)]
    VariableTracker.build(tx, record_).call_function(tx, arguments, {})


class _Plan:
    """Values of a frame: a line for each (see call_observer_compiled.cpp), and the variables of the tensors to read."""

    def __init__(self, tx: Any, class_name: str) -> None:
        self._tx = tx
        self.lines = [class_name]
        self.tensors: list[Any] = []
        self._given: set[int] | None = None  # the variables of the arguments, while an output is added
        self._num_objects = 0

    def add_own(self, module: Any) -> None:
        """Add weights and buffers of the module that the variable stands for."""
        for role, named in (("w", module.value._parameters), ("b", module.value._buffers)):
            for name, x in named.items():
                if x is None or (role == "b" and not (x.is_floating_point() or x.is_complex())):
                    continue
                if _is_plain(x):
                    self.add(role, name, module.var_getattr(self._tx, name))
                else:
                    self._add_line(role, "u", name, _NOT_READ)

    def add_inputs(self, args: Any, kwargs: Any) -> None:
        """Add the arguments of a call."""
        for key, variable in (*enumerate(args), *kwargs.items()):
            self.add("i", f"input[{key}]", variable)

    def add_output(self, output: Any, given: Iterable[Any]) -> None:
        """Add what a call returned. As walk.leaves, enter objects that are none of its arguments."""
        self._given = {id(_realized(variable)) for variable in given}
        self.add("o", "output", output)

    def add(self, role: str, label: str, variable: Any, depth: int = 0) -> None:
        """Add the leaves of a value, with the labels of walk.leaves.

        Dynamo guards on everything that it reads, and fails on some values (sparse tensors). So this reads only plain
        tensors among the values that the user's own code has not touched so far.
        """
        if not variable.is_realized():
            value = variable.original_value()
            if not _is_harmless(value, MAX_DEPTH):
                is_read = isinstance(value, Tensor | list | tuple | dict) or is_dataclass(value)
                self._add_line(role, *(("u", label, _NOT_READ) if is_read else ("x", label)))
                return
        variable = variable.realize()
        kind = variable.python_type()
        if issubclass(kind, Tensor):
            if kind in _PLAIN_TENSORS and getattr(variable, "layout", None) is torch.strided:
                self._add_line(role, "t", label)
                self.tensors.append(variable)
            else:
                self._add_line(role, "u", label, _NOT_READ)
            return
        children = self._children(variable)
        if children is None:
            is_none = variable.is_python_constant() and variable.as_python_constant() is None
            self._add_line(role, "n" if is_none else "x", label)
        elif len(self.lines) > MAX_LEAVES or depth == MAX_DEPTH:
            self._add_line(role, "u", label, _TOO_MANY)
        else:
            for key, child in children:
                self.add(role, f"{label}[{key}]", child, depth + 1)

    def _children(self, variable: Any) -> Iterable[tuple[object, Any]] | None:
        """Return keys and variables of what is in a container, or None for any other value."""
        tx = self._tx
        kind = variable.python_type()
        if issubclass(kind, tuple | list):
            items = variable.unpack_var_sequence(tx)
            is_data = len(items) > MAX_SCALARS and all(item.is_python_constant() for item in items)
            return None if is_data else enumerate(items)
        if issubclass(kind, dict):
            pairs = [
                pair.unpack_var_sequence(tx)
                for pair in variable.call_method(tx, "items", [], {}).unpack_var_sequence(tx)
            ]
            return [(_spell(key), item) for key, item in pairs]
        if is_dataclass(kind):
            return [(field.name, variable.var_getattr(tx, field.name)) for field in fields(kind)]
        return self._attributes(variable)

    def _attributes(self, variable: Any) -> list[tuple[object, Any]] | None:
        """Return the attributes of an object that the traced code has made, without numbers and texts."""
        if variable.source is not None or self._given is None or id(variable) in self._given:
            return None
        kinds = variable.python_type().__mro__
        is_callable = any("__call__" in vars(kind) for kind in kinds)
        if nn.Module in kinds or is_callable or self._num_objects == MAX_OBJECTS:
            return None
        self._num_objects += 1
        attributes = self._tx.output.side_effects.store_attr_mutations.get(variable, {})
        return [(name, value) for name, value in attributes.items() if not _is_left_out(value)] or None

    def _add_line(self, role: str, letter: str, label: str, reason: str = "") -> None:
        self.lines.append(f"{role}{letter} {label}\t{reason}" if reason else f"{role}{letter} {label}")


def _realized(variable: Any) -> Any:
    return variable.realize() if variable.is_realized() else variable


def _is_left_out(attribute: Any) -> bool:
    from torch._dynamo.variables import DeletedVariable

    attribute = _realized(attribute)
    if issubclass(type(attribute), DeletedVariable):
        return True
    return attribute.is_python_constant() and isinstance(attribute.as_python_constant(), SCALARS)


def _spell(key: Any) -> str:
    is_constant = key.is_python_constant()
    return spell_key(key.as_python_constant()) if is_constant else key.python_type().__name__


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
