"""The operator that a watched model has in a compiled graph: its way to the recorders, and its arguments.

A graph holds no Python objects, and a constant in it would make Dynamo compile each layer anew. So the operator takes
the site of a module (slot.py), a tensor that Dynamo makes an input of the graph. The wrappers of the module know its
recorders. Without a wrapper the operator does nothing, and the graph serves the next watch. The compiled part has a
kernel of its own (csrc/recorder/call_recorder_compiled.cpp), and falls back to the one here.

Dynamo's variables stand for the values of a call while it traces. This module reads those of tensors, None, numbers and
plain containers directly. Dynamo itself must read all others (dataclasses, a ModelOutput) by tracing `_add_leaves`. To
do so for all values doubled the time to trace GPT-2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ...numerics._extension import define
from ...recording.walk import MAX_DEPTH, MAX_LEAVES, MAX_SCALARS, spell_key
from ..slot import wrappers_at

NOBODY = -1  # the caller of a call that no watched call of the same graph made

# The operator is declared to write this tensor, so that a compiler keeps all calls and their order.
SEQUENCE = torch.zeros(1, dtype=torch.int64, device="cpu")


def _record(
    sequence: Tensor, site: Tensor, caller: Tensor | None, plan: str, tensors: Sequence[Tensor]
) -> None:
    sequence.add_(1)
    calls = _calls_at(site)
    if not plan:
        for call in calls:
            call.recorder.begin_compiled(call.node, list(tensors))
        return
    nodes = {} if caller is None else {id(outer.recorder): outer.node for outer in _calls_at(caller)}
    for call in reversed(calls):
        call.recorder.record_compiled(call.node, nodes.get(id(call.recorder), NOBODY), plan, list(tensors))


def _calls_at(site: Tensor) -> list[Any]:
    return [call for call in wrappers_at(int(site)) if call.recorder is not None]


def _fake_record(*_: object) -> None:
    """Do nothing: the operator counts calls in `sequence`, and no code reads that count."""


# No argument may be called `node` or `self`: Inductor passes an operator's arguments by name, among names of its own.
record_ = define(
    "record_(Tensor(a!) sequence, Tensor site, Tensor? caller, str plan, Tensor[] tensors) -> ()",
    _record,
    _fake_record,
)


# The arguments, as Dynamo puts them into the graph.

_NOT_READ = "in compiled code only plain tensors are read"
_SCALARS = (int, float, complex, str, bytes)
_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


# Role, label, and Dynamo's variable or the finished line (see csrc/recorder/call_recorder_compiled.cpp).
Leaf: TypeAlias = tuple[str, str, Any]


def put_begin(tx: Any, site: Any, leaves: list[Leaf]) -> None:
    """Put the operator into the graph before a call that no call of the graph made."""
    _, tensors = _plan(tx, "", leaves)
    _put(tx, site, _constant(None), _constant(""), tensors)


def put_record(tx: Any, site: Any, caller: Any, class_name: str, leaves: list[Leaf]) -> None:
    """Put the operator into the graph after a call. `caller` is the site of the module that made it, or None."""
    plan, tensors = _plan(tx, class_name, leaves)
    _put(tx, site, _constant(None) if caller is None else caller, plan, tensors)


def _put(tx: Any, site: Any, caller: Any, plan: Any, tensors: Any) -> None:
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.base import VariableTracker

    source = AttrSource(tx.import_source(__name__), "SEQUENCE")
    _call(tx, record_, VariableTracker.build(tx, SEQUENCE, source), site, caller, plan, tensors)


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
    """Return the text and the list of tensors for the operator, as variables."""
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
