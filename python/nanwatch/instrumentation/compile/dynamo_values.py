"""The values of a watched call as Dynamo knows them while it traces, and the operators that it puts into the graph.

Dynamo's variables stand for values. Those of tensors, None, numbers and plain containers are read here, in one step.
What else there is (dataclasses, a ModelOutput) Dynamo must read itself, from the code of `traced.add`; doing so for
all values took as long again as to trace GPT-2.
"""

from __future__ import annotations

from dataclasses import is_dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ...recording.walk import MAX_DEPTH, MAX_LEAVES, spell_key
from . import compile_ops, traced
from ._live import NOBODY


class Site(NamedTuple):
    """A call in a graph: what the operators are given besides its tensors.

    `sequence` is Dynamo's variable; `parts` are the letters of what is looked at (w, b, i, o), none for a call that
    only begins and ends a batch. Where the batch will be captured into a CUDA graph `device` is its device, and in the
    first call of the trace `outside` is the variable for what stays on the host.
    """

    sequence: Any
    outside: Any
    device: torch.device | None
    watch: int
    callee: int
    caller: int
    class_name: str
    parts: str


# Role, label and Dynamo's variable, or in its place the finished line (see csrc/recorder/call_recorder_compiled.cpp).
Leaf: TypeAlias = tuple[str, str, Any]


def put_begin(tx: Any, site: Site, found: list[Leaf]) -> None:
    """Put `begin_` into the graph where nothing in the graph has made the call."""
    if site.caller == NOBODY:
        if site.outside is not None:
            _call(tx, compile_ops.look_, site.outside, _constant(site.watch))
        _, tensors = _plan(tx, "", found, site.device)
        _call(tx, compile_ops.begin_, site.sequence, _constant(site.watch), _constant(site.callee), tensors)


def put_record(tx: Any, site: Site, found: list[Leaf]) -> None:
    """Put `record_` into the graph."""
    if site.parts or site.caller == NOBODY:
        lines, tensors = _plan(
            tx, site.class_name, [leaf for leaf in found if leaf[0] in site.parts], site.device
        )
        numbers = map(_constant, (site.watch, site.callee, site.caller))
        _call(tx, compile_ops.record_, site.sequence, *numbers, lines, tensors)


def own_leaves(tx: Any, module: Any) -> list[Leaf]:
    """Weights and buffers of the module that the variable stands for."""
    value: nn.Module = module.value
    found: list[tuple[str, str, Tensor]] = []
    found += [("w", name, x) for name, x in value._parameters.items() if x is not None]
    for name, buffer in value._buffers.items():
        if buffer is not None and (buffer.is_floating_point() or buffer.is_complex()):
            found.append(("b", name, buffer))
    return [
        (role, name, module.var_getattr(tx, name) if traced.is_plain(x) else _unread(role, name))
        for role, name, x in found
    ]


def given_leaves(args: Any, kwargs: Any) -> list[Leaf]:
    """The arguments of a call."""
    found: list[Leaf] = []
    for position, value in enumerate(args):
        _add(value, "i", f"input[{position}]", 0, found)
    for name, value in kwargs.items():
        _add(value, "i", f"input[{name}]", 0, found)
    return found


def output_leaves(output: Any) -> list[Leaf]:
    """What a call returned."""
    found: list[Leaf] = []
    _add(output, "o", "output", 0, found)
    return found


def device_of(leaf: Leaf) -> torch.device | None:
    """Of a tensor its device. Nothing is guarded on."""
    from torch._dynamo.variables import TensorVariable
    from torch._dynamo.variables.lazy import LazyVariableTracker

    value = leaf[2]
    if issubclass(type(value), LazyVariableTracker):
        value = value.realize() if value.is_realized() else value.original_value()
    return value.device if issubclass(type(value), Tensor | TensorVariable) else None


def _add(variable: Any, role: str, label: str, depth: int, found: list[Leaf]) -> None:
    """What Dynamo looks at it guards on, and of some values (sparse tensors) it can make nothing: of what the user's
    own code has not touched so far only plain tensors are touched here.
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
        return traced.is_plain(value)
    if isinstance(value, list | tuple | dict) and depth > 0 and len(value) <= MAX_LEAVES:
        values = value.values() if isinstance(value, dict) else value
        return all(_is_harmless(item, depth - 1) for item in values)
    return value is None


def _unread(role: str, label: str) -> str:
    return f"{role}u {label}\t{traced.NOT_READ}"


def _plan(tx: Any, class_name: str, found: list[Leaf], device: torch.device | None) -> tuple[Any, Any]:
    """The text and the list of tensors for an operator, as variables; with a device of tensors on it alone."""
    from torch._dynamo.variables import ListVariable, TensorVariable
    from torch._dynamo.variables.base import VariableTracker

    lines = [class_name]
    tensors: list[VariableTracker] = []
    for role, label, value in found:
        if isinstance(value, str):
            lines.append(value)
            continue
        variable = value.realize()
        if type(variable) is TensorVariable and traced.is_plain_variable(variable):
            lines.append(f"{role}t {label}")
            tensors.append(variable)
            continue
        text, inside = _call(tx, traced.add, variable, _constant(role), _constant(label)).items
        if text.as_python_constant():
            lines.append(text.as_python_constant())
        tensors += inside.items
    text = "\n".join(lines)
    if device is not None:
        text, tensors = _only_on(device, text, tensors)
    return _constant(text), ListVariable(tensors)


def _only_on(device: torch.device, text: str, tensors: list[Any]) -> tuple[str, list[Any]]:
    """The same with the lines of the other tensors unread: a captured graph takes nothing that is not on its device."""
    kept, remaining = [], iter(tensors)
    lines = text.split("\n")
    for i, line in enumerate(lines):
        if i == 0 or line[1] != "t":
            continue
        tensor = next(remaining)
        if tensor.device == device:
            kept.append(tensor)
        else:
            lines[i] = f"{line[0]}u{line[2:]}\t{traced.NOT_CAPTURED}"
    return "\n".join(lines), kept


def _call(tx: Any, function: Any, *args: Any) -> Any:
    from torch._dynamo.variables.base import VariableTracker

    return VariableTracker.build(tx, function).call_function(tx, list(args), {})


def _constant(value: Any) -> Any:
    from torch._dynamo.variables import ConstantVariable

    return ConstantVariable.create(value)
