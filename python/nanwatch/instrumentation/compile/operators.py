"""Operators that a watched model has in a compiled graph: their way to a recorder, and their arguments.

A graph holds numbers and tensors, no Python objects, so each operator takes the number of a recorder. The compiled part
has kernels of its own for the operators (csrc/recorder/call_recorder_compiled.cpp), and falls back to those here. A
model that is watched again, after its first watch has stopped, gets its number back, so that the graph compiled before
serves the new watch.

Dynamo's variables stand for the values of a call while it traces. This module reads those of tensors, None, numbers and
plain containers directly. Dynamo itself must read all others (dataclasses, a ModelOutput) by tracing `_add_leaves`. To
do so for all values doubled the time to trace GPT-2.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ...numerics._extension import define
from ...recording.walk import MAX_DEPTH, MAX_LEAVES, MAX_SCALARS, spell_key
from ...util.modules import WeakIdentityDict

NOBODY = -1  # the caller of a call that no watched call of the same graph made

_recorders: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers: WeakIdentityDict[list[int]] = WeakIdentityDict()
_next_number = itertools.count()


def register_recorder(model: nn.Module, recorder: Any) -> int:
    """Give the recorder of `model` the number by which compiled code finds it."""
    numbers = _numbers.get(model)
    if numbers is None:
        numbers = _numbers[model] = []
    free = [one for one in numbers if one not in _recorders]
    number = free[0] if free else next(_next_number)
    if not free:
        numbers.append(number)
    _recorders[number] = recorder
    recorder.watch = number
    return number


def unregister_recorder(recorder: Any) -> None:
    """Take the recorder's number away. Its operators in compiled code do nothing from now on."""
    number: int = recorder.watch
    if _recorders.get(number) is recorder:
        del _recorders[number]
    recorder.watch = -1


def _begin(sequence: Tensor, watch: int, callee: int, tensors: Sequence[Tensor]) -> None:
    _count(sequence)
    if (recorder := _recorders.get(watch)) is not None:
        recorder.begin_compiled(callee, list(tensors))


def _record(
    sequence: Tensor, watch: int, callee: int, caller: int, plan: str, tensors: Sequence[Tensor]
) -> None:
    _count(sequence)
    if (recorder := _recorders.get(watch)) is not None:
        recorder.record_compiled(callee, caller, plan, list(tensors))


def _count(sequence: Tensor) -> None:
    if sequence.device.type == "cpu":
        sequence.add_(1)


def _fake_nothing(*_: object) -> None:
    """Do nothing: the operators count calls in `sequence`, and no code reads that count."""


# No argument may be called `node` or `self`: Inductor passes an operator's arguments by name, among names of its own.
begin_ = define(
    "begin_(Tensor(a!) sequence, int watch, int callee, Tensor[] tensors) -> ()", _begin, _fake_nothing
)
record_ = define(
    "record_(Tensor(a!) sequence, int watch, int callee, int caller, str plan, Tensor[] tensors) -> ()",
    _record,
    _fake_nothing,
)


# The arguments, as Dynamo puts them into the graph.

_NOT_READ = "in compiled code only plain tensors are read"
_SCALARS = (int, float, complex, str, bytes)
_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


class Site(NamedTuple):
    """Call in a graph: the arguments of the operators besides its tensors.

    `sequence` is Dynamo's variable. `parts` are the letters of the tensors to read (w, b, i, o), none for a call that
    only begins and ends a batch.
    """

    sequence: Any
    watch: int
    callee: int
    caller: int
    class_name: str
    parts: str


# Role, label, and Dynamo's variable or the finished line (see csrc/recorder/call_recorder_compiled.cpp).
Leaf: TypeAlias = tuple[str, str, Any]


def put_begin(tx: Any, site: Site, found: list[Leaf]) -> None:
    """Put `begin_` into the graph for a call that no watched call of the graph made."""
    if site.caller == NOBODY:
        _, tensors = _plan(tx, "", found)
        _call(tx, begin_, site.sequence, _constant(site.watch), _constant(site.callee), tensors)


def put_record(tx: Any, site: Site, found: list[Leaf]) -> None:
    """Put `record_` into the graph."""
    if site.parts or site.caller == NOBODY:
        lines, tensors = _plan(tx, site.class_name, [leaf for leaf in found if leaf[0] in site.parts])
        numbers = map(_constant, (site.watch, site.callee, site.caller))
        _call(tx, record_, site.sequence, *numbers, lines, tensors)


def own_leaves(tx: Any, module: Any) -> list[Leaf]:
    """Return weights and buffers of the module that the variable stands for."""
    value: nn.Module = module.value
    found: list[tuple[str, str, Tensor]] = []
    found += [("w", name, x) for name, x in value._parameters.items() if x is not None]
    for name, buffer in value._buffers.items():
        if buffer is not None and (buffer.is_floating_point() or buffer.is_complex()):
            found.append(("b", name, buffer))
    return [
        (role, name, module.var_getattr(tx, name) if _is_plain(x) else _unread(role, name))
        for role, name, x in found
    ]


def given_leaves(args: Any, kwargs: Any) -> list[Leaf]:
    """Return the arguments of a call."""
    found: list[Leaf] = []
    for position, value in enumerate(args):
        _add(value, "i", f"input[{position}]", 0, found)
    for name, value in kwargs.items():
        _add(value, "i", f"input[{name}]", 0, found)
    return found


def output_leaves(output: Any) -> list[Leaf]:
    """Return the result of a call."""
    found: list[Leaf] = []
    _add(output, "o", "output", 0, found)
    return found


def _add(variable: Any, role: str, label: str, depth: int, found: list[Leaf]) -> None:
    """Add the leaves of a value.

    Dynamo guards on everything that it reads, and fails on some values (sparse tensors). So this reads only plain
    tensors among the values that the user's own code has not touched so far.
    """
    from torch._dynamo.variables import ConstantVariable, ConstDictVariable, ListVariable, TupleVariable
    from torch._dynamo.variables.lazy import LazyVariableTracker

    if issubclass(type(variable), LazyVariableTracker):
        if not variable.is_realized():
            found.append((role, label, _untouched(variable, role, label)))
            return
        variable = variable.realize()
    kind = type(variable)
    if len(found) < MAX_LEAVES and depth < MAX_DEPTH:
        if kind in (ListVariable, TupleVariable):
            for position, item in enumerate(variable.items):
                _add(item, role, f"{label}[{position}]", depth + 1, found)
            return
        if kind is ConstDictVariable:
            for key, item in variable.items.items():
                _add(item, role, f"{label}[{spell_key(key.vt.as_python_constant())}]", depth + 1, found)
            return
    if kind is ConstantVariable:
        found.append((role, label, f"{role}n {label}" if variable.value is None else f"{role}x {label}"))
    else:
        found.append((role, label, variable))


def _untouched(variable: Any, role: str, label: str) -> Any:
    value = variable.original_value()
    if value is None:
        return f"{role}n {label}"
    if _is_harmless(value, MAX_DEPTH):
        return variable
    if isinstance(value, Tensor | list | tuple | dict) or is_dataclass(value):
        return _unread(role, label)
    return f"{role}x {label}"


def _is_harmless(value: Any, depth: int) -> bool:
    if isinstance(value, Tensor):
        return _is_plain(value)
    if isinstance(value, list | tuple | dict) and depth > 0 and len(value) <= MAX_LEAVES:
        values = value.values() if isinstance(value, dict) else value
        return all(_is_harmless(item, depth - 1) for item in values)
    return value is None


def _unread(role: str, label: str) -> str:
    return f"{role}u {label}\t{_NOT_READ}"


def _plan(tx: Any, class_name: str, found: list[Leaf]) -> tuple[Any, Any]:
    """Return the text and the list of tensors for an operator, as variables."""
    from torch._dynamo.variables import ListVariable, TensorVariable
    from torch._dynamo.variables.base import VariableTracker

    lines = [class_name]
    tensors: list[VariableTracker] = []
    for role, label, value in found:
        if isinstance(value, str):
            lines.append(value)
            continue
        variable = value.realize()
        if type(variable) is TensorVariable and _is_plain_variable(variable):
            lines.append(f"{role}t {label}")
            tensors.append(variable)
            continue
        text, inside = _call(tx, _add_leaves, variable, _constant(role), _constant(label)).items
        if text.as_python_constant():
            lines.append(text.as_python_constant())
        tensors += inside.items
    return _constant("\n".join(lines)), ListVariable(tensors)


def _call(tx: Any, function: Any, *args: Any) -> Any:
    from torch._dynamo.variables.base import VariableTracker

    return VariableTracker.build(tx, function).call_function(tx, list(args), {})


def _constant(value: Any) -> Any:
    from torch._dynamo.variables import ConstantVariable

    return ConstantVariable.create(value)


# Dynamo traces the functions below to find tensors inside a value that it does not know itself. They are plain Python,
# because a construct that Dynamo does not know would break the user's graph.


def _is_plain(x: Tensor) -> bool:
    """Return whether the operators read `x`: it is strided, and no subclass whose own code would get the operator."""
    return type(x) in _PLAIN_TENSORS and x.layout is torch.strided


def _is_plain_variable(variable: Any) -> bool:
    """Return whether the operators read the tensor that Dynamo's variable stands for."""
    return variable.python_type() in _PLAIN_TENSORS and variable.layout is torch.strided


def _add_leaves(value: Any, role: str, label: str) -> tuple[str, list[Tensor]]:
    """Return the lines for all leaves of `value`, with the labels of walk.leaves, and its tensors."""
    lines: list[str] = []
    tensors: list[Tensor] = []
    _add_leaf(value, role, label, 0, lines, tensors)
    return "\n".join(lines), tensors


def _add_leaf(value: Any, role: str, label: str, depth: int, lines: list[str], tensors: list[Tensor]) -> None:
    """Add a line for every leaf of `value`, with the labels of walk.leaves, and the leaf itself if it is a tensor."""
    if isinstance(value, Tensor):
        if _is_plain(value):
            lines.append(f"{role}t {label}")
            tensors.append(value)
        else:
            lines.append(f"{role}u {label}\t{_NOT_READ}")
    elif value is None:
        lines.append(f"{role}n {label}")
    elif isinstance(value, _SCALARS):
        lines.append(f"{role}x {label}")
    elif len(lines) > MAX_LEAVES or depth > MAX_DEPTH:
        lines.append(f"{role}u {label}\ttoo many values in compiled code")
    elif isinstance(value, (tuple, list)):
        if len(value) > MAX_SCALARS and all(item is None or isinstance(item, _SCALARS) for item in value):
            lines.append(f"{role}x {label}")
            return
        for position, item in enumerate(value):
            _add_leaf(item, role, f"{label}[{position}]", depth + 1, lines, tensors)
    elif isinstance(value, dict):
        for key, item in value.items():
            _add_leaf(item, role, f"{label}[{_spell_traced(key)}]", depth + 1, lines, tensors)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            _add_leaf(getattr(value, field.name), role, f"{label}[{field.name}]", depth + 1, lines, tensors)
    else:
        lines.append(f"{role}x {label}")


def _spell_traced(key: Any) -> str:
    """Return the same as walk.spell_key, in Python that Dynamo knows."""
    if isinstance(key, str):
        plain = 0 < len(key) <= 80
        for letter in key:
            plain = plain and (letter.isalnum() or letter in "_.-/")
        if plain:
            return key
    elif key is not None and not isinstance(key, _SCALARS):
        return type(key).__name__
    shown = repr(key)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
