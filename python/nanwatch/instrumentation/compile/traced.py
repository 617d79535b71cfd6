"""What Dynamo reads to find the tensors inside a value of a watched call that it does not know itself.

It keeps to plain Python: a construct that Dynamo does not know would break the user's graph.
"""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...recording.walk import MAX_DEPTH, MAX_LEAVES, MAX_SCALARS

NOT_READ = "in compiled code only plain tensors are read"
NOT_CAPTURED = "a CUDA graph reads what is on its own device"
_SCALARS = (int, float, complex, str, bytes)
_PLAIN_TENSORS = (Tensor, nn.Parameter, nn.Buffer)


def is_plain(x: Tensor) -> bool:
    """Whether the operators read it: no subclass, whose own code would be given the operator, and strided."""
    return type(x) in _PLAIN_TENSORS and x.layout is torch.strided


def is_plain_variable(variable: Any) -> bool:
    """The same of Dynamo's variable for a tensor."""
    return variable.python_type() in _PLAIN_TENSORS and variable.layout is torch.strided


def add(value: Any, role: str, label: str) -> tuple[str, list[Tensor]]:
    """The lines for every leaf of `value`, with the labels of walk.leaves, and its tensors."""
    lines: list[str] = []
    tensors: list[Tensor] = []
    _add(value, role, label, 0, lines, tensors)
    return "\n".join(lines), tensors


def _add(value: Any, role: str, label: str, depth: int, lines: list[str], tensors: list[Tensor]) -> None:
    """One line and, where it is a tensor, the tensor itself for every leaf of `value`; the labels are walk.leaves'."""
    if isinstance(value, Tensor):
        if is_plain(value):
            lines.append(f"{role}t {label}")
            tensors.append(value)
        else:
            lines.append(f"{role}u {label}\t{NOT_READ}")
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
            _add(item, role, f"{label}[{position}]", depth + 1, lines, tensors)
    elif isinstance(value, dict):
        for key, item in value.items():
            _add(item, role, f"{label}[{_spell(key)}]", depth + 1, lines, tensors)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            _add(getattr(value, field.name), role, f"{label}[{field.name}]", depth + 1, lines, tensors)
    else:
        lines.append(f"{role}x {label}")


def _spell(key: Any) -> str:
    """walk.spell_key in what Dynamo knows."""
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
