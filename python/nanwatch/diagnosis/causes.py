"""Causes of a non-finite value in the words of the program: its arguments, its weights, its labels.

Each sentence says what is so of the operands of the operation that made the value.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from ..numerics.ranges import tensor_health
from ..numerics.readable import is_plain
from ..recording.observe import state_of
from ..recording.walk import call_leaves
from ..util.modules import each_module
from .diagnosis import ModuleCall
from .operation import Operation

# The least and the largest operand of each operation. A guard is right if rounding took the operand past them, and
# hides a mistake otherwise, such as vectors that are not normalised.
DOMAINS = {
    **dict.fromkeys(("log", "log2", "log10", "sqrt", "rsqrt"), (0, inf)),
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), (-1, 1)),
    "log1p": (-1, inf),
    "acosh": (1, inf),
}


def named_arguments(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, tuple[str, Tensor]]:
    """Return the tensors of a call with the names that they have in its forward, by label.

    The tensor of the label `input[1]` may have the name `labels`.
    """
    names: list[str] = []
    with suppress(Exception):  # a scripted forward cannot be inspected
        names = list(inspect.signature(module.forward).parameters)
    arguments = {}
    for label, x in call_leaves(args, kwargs):
        if isinstance(x, Tensor):
            first, _, rest = label.removeprefix("input[").partition("]")
            is_position = first.isdecimal() and int(first) < min(len(args), len(names))
            arguments[label] = (names[int(first)] if is_position else first) + rest, x
    return arguments


def came_in(name: str, x: Tensor) -> str:
    """Return the sentence on a tensor that came in non-finite."""
    health = tensor_health(x)
    counts = (health.num_nan, "nan"), (health.num_posinf, "inf"), (health.num_neginf, "-inf")
    return f"`{name}` came in with " + " and ".join(f"{count:,} {word}" for count, word in counts if count)


def causes(
    operation: Operation,
    given: Mapping[str, Any],
    operands: Sequence[Tensor],
    strangers: Sequence[Tensor],
    calls: Sequence[ModuleCall],
) -> Iterator[str]:
    """Yield sentences on what the operation was `given`, and on the arguments and weights of the calls under way.

    `strangers` are the operands that were non-finite before.
    """
    named = list(_named(calls))
    # The program has written to these tensors, so they no longer hold what it was given.
    written = [x for call in calls for _, x, version in call.versions if x._version != version]
    for i, operand in enumerate(operands):
        if any(operand is x for x in strangers) and not any(operand is x for x in written):
            memory = _memory(operand)
            names = (name for name, x in named if memory == _memory(x) and not bool(torch.isfinite(x).all()))
            name = next(names, None)
            yield (
                f"operand[{i}] was not finite before, and no operation that was seen wrote it"
                if name is None
                else came_in(name, operand)
            )
    yield from _empty(operands, calls)
    yield from _ignored_labels(operation, given)
    yield from _masked_rows(operation, given)
    yield from _outside_domain(operation, given)


def _named(calls: Sequence[ModuleCall]) -> Iterator[tuple[str, Tensor]]:
    """Yield the arguments of the calls, those of the innermost first, then the weights inside the innermost."""
    for call in reversed(calls):
        yield from named_arguments(call.module, call.args, call.kwargs).values()
    for path, module in each_module(calls[-1].module) if calls else ():
        for role, label, x in state_of(module):
            if role == "weight":
                yield ".".join(filter(None, (path, label))), x


def _memory(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata) if is_plain(x) else id(x)


def _empty(operands: Sequence[Tensor], calls: Sequence[ModuleCall]) -> Iterator[str]:
    empty = [i for i, x in enumerate(operands) if not x.numel()]
    for call in calls[:1] if empty else ():
        for name, x in named_arguments(call.module, call.args, call.kwargs).values():
            if not x.numel():
                yield f"the batch is empty: `{name}` has shape {list(x.shape)}"
                return
    for i in empty[:1]:
        yield f"operand[{i}] is empty, of shape {list(operands[i].shape)}"


def _ignored_labels(operation: Operation, given: Mapping[str, Any]) -> Iterator[str]:
    labels, ignored = given.get("target"), given.get("ignore_index", -100)
    if not operation.base.startswith("nll_loss") or not isinstance(labels, Tensor) or not labels.numel():
        return
    if bool((labels == ignored).all()):
        yield f"all {labels.numel():,} labels are ignore_index ({ignored}): the mean is that of nothing"


def _masked_rows(operation: Operation, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence if a softmax had rows that are masked throughout."""
    if operation.base in ("_softmax", "_log_softmax"):
        x, dim, what = given["self"], given["dim"], "its operand"
    else:
        x, dim = next((given[name] for name in ("attn_mask", "attn_bias") if name in given), None), -1
        what = "its mask"
    if not isinstance(x, Tensor) or x.ndim == 0 or not x.dtype.is_floating_point:
        return
    empty = (x == -torch.inf).all(dim=dim)
    if count := int(empty.sum()):
        first = [int(i) for i in empty.nonzero()[0]]
        yield (
            f"{what} is -inf everywhere along dimension {dim % x.ndim} in {count} of {empty.numel()} rows, the first at"
            f" {first}: a row in which everything is masked leaves softmax nothing to choose from"
        )


def _outside_domain(operation: Operation, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence if an operation was given values for which it is not defined."""
    x, domain = given.get("self"), DOMAINS.get(operation.base)
    if domain is None or not isinstance(x, Tensor) or not (is_plain(x) and x.dtype.is_floating_point):
        return
    least, largest = domain
    below, above = x[x < least], x[x > largest]
    if below.numel():
        words = f"below {least}, the least {float(below.min()):.7g}"
    elif above.numel():
        words = f"above {largest}, the largest {float(above.max()):.7g}"
    else:
        return
    yield (
        f"{below.numel() or above.numel():,} of {x.numel():,} elements of its operand are {words}: a guard fits only if"
        " rounding took them there"
    )
