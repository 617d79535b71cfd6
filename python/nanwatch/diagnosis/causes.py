"""Causes of a non-finite value in the words of the program: its arguments, its weights, its labels.

Each sentence says what is so of the operands of the operation that made the value.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..numerics.ranges import tensor_health
from ..numerics.readable import is_plain
from ..recording.observe import state_of
from ..recording.walk import call_leaves
from ..util.modules import each_module
from .diagnosis import BadRows, ModuleCall
from .operation import Operation

_DEVIATIONS = frozenset({"std", "var", "std_mean", "var_mean"})
_MOST_ROWS = 4


def argument_names(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """Return the names that the tensors of a call have in its forward, by label: `labels` for `input[1]`."""
    names: list[str] = []
    with suppress(Exception):  # a scripted forward cannot be inspected
        names = list(inspect.signature(module.forward).parameters)
    found = {}
    for label, x in call_leaves(args, kwargs):
        if isinstance(x, Tensor):
            first, _, rest = label.removeprefix("input[").partition("]")
            is_position = first.isdecimal() and int(first) < min(len(args), len(names))
            found[label] = (names[int(first)] if is_position else first) + rest
    return found


def came_in(name: str, x: Tensor) -> str:
    """Return the sentence on a tensor that came in non-finite."""
    health = tensor_health(x)
    counts = (health.num_nan, "nan"), (health.num_posinf, "inf"), (health.num_neginf, "-inf")
    return f"`{name}` came in with " + " and ".join(f"{count:,} {word}" for count, word in counts if count)


def causes(
    operation: Operation,
    given: Mapping[str, Any],
    operands: Sequence[Tensor],
    strangers: Sequence[int],
    calls: Sequence[ModuleCall],
    rows: BadRows,
) -> Iterator[str]:
    """Yield sentences on what the operation was `given`, and on the arguments and weights of the calls under way.

    `strangers` are the operands that were non-finite before, and `rows` those of the result that are non-finite.
    """
    named = list(_named(calls))
    for i in strangers:
        memory = _memory(operands[i])
        name = next(
            (name for name, x in named if memory == _memory(x) and not bool(torch.isfinite(x).all())), None
        )
        yield (
            f"operand[{i}] was not finite before, and no operation that was seen wrote it"
            if name is None
            else came_in(name, operands[i])
        )
    yield from _empty(operands, calls)
    yield from _ignored_labels(operation, given)
    yield from _masked_rows(operation, given)
    if operation.base in _DEVIATIONS and operands and operands[0].numel() == _length(given, operands[0]) > 0:
        yield "it is the deviation of one number: with the correction of 1 that is 0 divided by 0"
    if not strangers:
        yield from _zero_rows(named, rows)


def _named(calls: Sequence[ModuleCall]) -> Iterator[tuple[str, Tensor]]:
    """Yield the arguments of the calls, those of the innermost first, then the weights inside the innermost."""
    for call in reversed(calls):
        leaves = dict(call_leaves(call.args, call.kwargs))
        for label, name in argument_names(call.module, call.args, call.kwargs).items():
            yield name, leaves[label]
    for path, module in each_module(calls[-1].module) if calls else ():
        for role, label, x in state_of(module):
            if role == "weight":
                yield ".".join(filter(None, (path, label))), x


def _memory(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata) if is_plain(x) else id(x)


def _empty(operands: Sequence[Tensor], calls: Sequence[ModuleCall]) -> Iterator[str]:
    empty = [i for i, x in enumerate(operands) if not x.numel()]
    for call in calls[:1] if empty else ():
        leaves = dict(call_leaves(call.args, call.kwargs))
        for label, name in argument_names(call.module, call.args, call.kwargs).items():
            if not leaves[label].numel():
                yield f"the batch is empty: `{name}` has shape {list(leaves[label].shape)}"
                return
    for i in empty[:1]:
        yield f"operand[{i}] is empty, of shape {list(operands[i].shape)}"


def _length(given: Mapping[str, Any], x: Tensor) -> int:
    """Return how many numbers the result of a reduction has."""
    dims = given.get("dim")
    if dims is None or dims == []:
        return 1
    reduced = {dim % max(x.ndim, 1) for dim in (dims if isinstance(dims, list | tuple) else [dims])}
    length = 1
    for dim, size in enumerate(x.shape):
        length *= 1 if dim in reduced else size
    return length


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


def _zero_rows(named: Sequence[tuple[str, Tensor]], rows: BadRows) -> Iterator[str]:
    """Yield a sentence for the first argument or weight that is zero in the very rows where the result is bad."""
    bad = {size: list(indices) for size, indices in rows if indices}
    for name, x in named if bad else ():
        if x.ndim < 2 or x.shape[0] not in bad or not is_plain(x) or not x.dtype.is_floating_point:
            continue
        zero = bad[x.shape[0]]
        if not bool(x[zero].any()) and int(x.flatten(1).any(1).sum()) == len(x) - len(zero):
            shown = ", ".join(map(str, zero[:_MOST_ROWS]))
            more = f" and {len(zero) - _MOST_ROWS:,} more" if len(zero) > _MOST_ROWS else ""
            yield f"row{'s' * (len(zero) > 1)} {shown}{more} of `{name}` {'are' if len(zero) > 1 else 'is'} zero"
            return
