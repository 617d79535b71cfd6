"""Operands of an operation, and causes of a non-finite value in the words of the program: its arguments, its weights.

Each sentence says what is so of the operands of the operation that made the value. The step of an optimizer is computed
with once more from the state that it left, in the formats of the state. Fused and foreach steps leave the same state as
plain ones.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..numerics import _reference
from ..numerics.ranges import tensor_health
from ..numerics.readable import is_plain, local_shard, only_our_dispatch
from ..recording.events import Settings
from ..recording.observe import observe
from ..recording.walk import leaves
from ..records.record import Record
from ..report.finding import Cure, Finding
from ..util.messages import suppressing
from ..util.program import parameters_of
from .batch_snapshot import BatchSnapshot

# The least and the largest operand of each operation. A guard is right if rounding took the operand past them, and
# hides a mistake otherwise, such as vectors that are not normalised.
DOMAINS = {
    **dict.fromkeys(("log", "log2", "log10", "sqrt", "rsqrt"), (0, math.inf)),
    **dict.fromkeys(("acos", "asin", "atanh", "erfinv"), (-1, 1)),
    "log1p": (-1, math.inf),
    "acosh": (1, math.inf),
}
_COUNTED = Settings(counts=True)
# In-place operations that do not look at what was there before, as none does that draws random numbers.
_OVERWRITING = frozenset({"copy_", "fill_", "zero_", "set_", "_foreach_copy_", "_foreach_zero_"})
_VALUE = re.compile("number|float|Tensor")


# Operations as the dispatcher has them


class Operation:
    """The schema of an overload, as far as a re-run needs it.

    `values` are the arguments that take part in the arithmetic (an `int` is a dimension or a size), `written` those
    that it writes to, `overwritten` those of them that it does not read before; `fresh` are the positions of the
    results that are memory of their own. `allocates`: it leaves that memory unwritten.
    """

    def __init__(self, func: Any) -> None:
        schema = func._schema
        self.name, self.base = str(func), schema.name.split("::")[-1]
        self.arguments = [x.name for x in schema.arguments]
        # A Python number is also given where the schema has a tensor, as in x * 2.
        self.values = {x.name for x in schema.arguments if _VALUE.search(str(x.type))}
        self.written = [x.name for x in schema.arguments if x.alias_info and x.alias_info.is_write]
        results = [x.name for x in schema.arguments if x.kwarg_only and x.name in self.written]
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags
        self.overwritten = self.written[:1] if is_drawn or self.base in _OVERWRITING else results
        # Its result is its argument, by the schema: memory that Python data was written to, unseen.
        is_lifted = self.base == "lift_fresh"
        self.fresh = [i for i, x in enumerate(schema.returns) if is_lifted or x.alias_info is None]
        self.num_results = len(schema.returns)
        self.allocates = self.base.startswith(("empty", "new_empty", "_empty"))
        self.pointwise = torch.Tag.pointwise in func.tags

    def targets(self, named: Mapping[str, Any], result: Any) -> list[Tensor]:
        """Return the tensors that a call with these arguments has written: some of them, and results that are new."""
        results = (result,) if self.num_results == 1 else result
        values = [named[name] for name in self.written if name in named]
        return tensors_in([*values, *(results[i] for i in self.fresh)])


operation_of = functools.cache(Operation)


class Operands(NamedTuple):
    """The operands of a call of `operation`: its tensors, a record with counts for each, and its numbers by name.

    `named` are all arguments of the call.
    """

    operation: Operation
    named: Mapping[str, Any]
    tensors: list[Tensor]
    records: list[Record]
    numbers: list[tuple[str, float]]

    @classmethod
    def of(cls, operation: Operation, named: Mapping[str, Any]) -> Operands:
        """Return the operands of a call that is about to be made, or has been made and wrote to none of them."""
        numbers = [(x, named[x]) for x in named if x in operation.values and type(named[x]) in (int, float)]
        is_read = operation.base != "lift_fresh"
        tensors = tensors_in([named[x] for x in named if is_read and x not in operation.overwritten])
        # A division or a logarithm does not forgive zeros and subnormals, which are usual among integers.
        counts = [Settings(counts=x.dtype.is_floating_point) for x in tensors]
        pairs = enumerate(zip(tensors, counts, strict=True))
        records = [observe(x, f"operand[{i}]", "input", wanted=wanted) for i, (x, wanted) in pairs]
        return cls(operation, named, tensors, records, numbers)

    def shares(self, bad: Sequence[Tensor]) -> list[Tensor] | None:
        """Return for each operand the elements of the bad result that it made so; None where that cannot be compared.

        It can for an elementwise operation.
        """
        # An operation in place has overwritten an operand.
        is_comparable = self.operation.pointwise and not self.operation.written and len(bad) == 1
        if not is_comparable or not all(map(is_plain, (*bad, *self.tensors))):
            return None
        shares = [nonfinite(bad[0]) & nonfinite(x) for x in self.tensors]
        if self.operation.base == "where" and len(shares) == 3:
            shares[1:] = [shares[1] & self.tensors[0], shares[2] & ~self.tensors[0]]
        return shares


def nonfinite(x: Tensor) -> Tensor:
    """Return the elements that are nan or infinite."""
    return ~torch.isfinite(_reference._to_arithmetic(x.detach()))


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors of an argument or a result. The attributes of an object are no part of it."""
    return [x for _, x in leaves(value, "", objects=False) if isinstance(x, Tensor)]


# The operands of an operation, in words


def named_arguments(call: BatchSnapshot) -> list[tuple[str, Tensor]]:
    """Return the tensors of a call with their names in its forward: that of the label `input[1]` may be `labels`."""
    names: dict[str, str] = {}
    with suppress(Exception):  # a scripted forward cannot be inspected
        parameters = zip(inspect.signature(call.module.forward).parameters, call.args, strict=False)
        names = {str(i): name for i, (name, _) in enumerate(parameters)}
    parts = ((label.removeprefix("input[").partition("]"), x) for label, x in call.tensors().items())
    return [(names.get(first, first) + rest, x) for (first, _, rest), x in parts]


def came_in(name: str, x: Tensor) -> str:
    """Return the sentence on a tensor that came in non-finite."""
    health = tensor_health(x)
    counts = (health.num_nan, "nan"), (health.num_posinf, "inf"), (health.num_neginf, "-inf")
    return f"`{name}` came in with " + " and ".join(f"{count:,} {word}" for count, word in counts if count)


def causes(given: Operands, strangers: Sequence[int], calls: Sequence[BatchSnapshot]) -> Iterator[str]:
    """Yield sentences on what an operation was given, by name, and on the arguments and weights of the open calls.

    `strangers` are the numbers of the operands that were non-finite before.
    """
    base, named, operands = given.operation.base, given.named, given.tensors
    arguments = [named_arguments(call) for call in calls]
    # The program has written to these tensors, so they no longer hold what it was given.
    written = {id(x) for call in calls for x in call.written().values()}
    for i in strangers:
        if id(operands[i]) in written:
            continue
        # The arguments of the innermost call first, then the weights inside it.
        tensors = [pair for pairs in reversed(arguments) for pair in pairs]
        tensors += calls[-1].module.named_parameters() if calls else ()
        memory = memory_of(operands[i])
        names = (name for name, x in tensors if memory_of(x) == memory and not bool(torch.isfinite(x).all()))
        unknown = f"operand[{i}] was not finite before, and no operation that was seen wrote it"
        yield next((came_in(name, operands[i]) for name in names), unknown)
    for i, x in [(i, x) for i, x in enumerate(operands) if not x.numel()][:1]:
        unknown = f"operand[{i}] is empty, of shape {list(x.shape)}"
        batches = ((name, y) for name, y in (arguments[0] if calls else ()) if not y.numel())
        words = (f"the batch is empty: `{name}` has shape {list(y.shape)}" for name, y in batches)
        yield next(words, unknown)
    if base.startswith("nll_loss"):
        labels, ignored, weight = named["target"], named.get("ignore_index", -100), named.get("weight")
        taken = labels[labels != ignored]
        if labels.numel() and not taken.numel():
            yield f"all {labels.numel():,} labels are ignore_index ({ignored}): the mean is that of nothing"
        elif taken.numel() and weight is not None and not bool(weight[taken].any()):
            yield f"all {taken.numel():,} labels are of classes of weight 0: the mean is that of nothing"
    yield from _masked_rows(base, named)
    yield from _outside_domain(base, named)


def addressable(x: Tensor) -> Tensor:
    """Return the tensor; of a DTensor its shard."""
    shard = local_shard(x)
    return x if shard is None else shard


def memory_of(x: Tensor) -> int:
    """Return what two tensors have in common that share memory."""
    return int(x.untyped_storage()._cdata) if is_plain(x) else id(x)


def _masked_rows(base: str, named: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence if a softmax had rows that are masked throughout."""
    if base in ("_softmax", "_log_softmax"):
        x, dim, what = named["self"], named["dim"], "its operand"
    else:
        x, dim, what = named.get("attn_mask", named.get("attn_bias")), -1, "its mask"
    if not isinstance(x, Tensor) or x.ndim == 0 or not x.dtype.is_floating_point:
        return
    empty = (x == -torch.inf).all(dim=dim)
    if count := int(empty.sum()):
        first = [int(i) for i in empty.nonzero()[0]]
        yield (
            f"{what} is -inf everywhere along dimension {dim % x.ndim} in {count} of {empty.numel()} rows, the first at"
            f" {first}: a row in which everything is masked leaves softmax nothing to choose from"
        )


def _outside_domain(base: str, named: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence if an operation was given values for which it is not defined."""
    x = named.get("self")
    exponents = torch.as_tensor(named.get("exponent", 0))
    base = "sqrt" if base == "pow" and bool((exponents != exponents.round()).any()) else base
    if base not in DOMAINS or not isinstance(x, Tensor) or not is_plain(x) or x.is_complex():
        return
    least, largest = DOMAINS[base]
    below, above = x[x < least], x[x > largest]
    side = f"below {least}, the least {float(below.min()):.7g}" if below.numel() else ""
    side = side or (f"above {largest}, the largest {float(above.max()):.7g}" if above.numel() else "")
    if side:
        count = f"{below.numel() or above.numel():,} of {x.numel():,} elements of its operand are"
        yield f"{count} {side}: a guard fits only if rounding took them there"


# The step of an optimizer


def is_taken_apart(optimizer: Optimizer) -> bool:
    """Return whether `take_apart` knows what a step of the optimizer computes."""
    return bool({kind.__name__ for kind in type(optimizer).__mro__} & {"Adam", "AdamW", "SGD"})


class StepAgain(nn.Module):
    """A step of an optimizer as a module. A call takes it from these values of `tensors`, and returns the weights.

    The values begin as the step left them. Elements that are nan become 0, and infinite ones the largest number.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        super().__init__()
        self._optimizer, self._state = optimizer, _copied(optimizer.state)
        weights = parameters_of(optimizer)
        self.tensors = tensors_in([weights, [x.grad for x in weights], [*self._state.values()]])
        self.values = [x.detach().nan_to_num() for x in self.tensors]

    def forward(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the weights after the step."""
        for x, value in zip(self.tensors, values, strict=True):
            x.data = value.clone()
        self._optimizer.state.update(_copied(self._state))
        inspect.unwrap(type(self._optimizer).step)(self._optimizer)
        return [x.detach().clone() for x in parameters_of(self._optimizer)]


def _copied(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the state with new dicts. Some optimizers, as MADGRAD, also keep a number or a tensor under a name."""
    return {key: dict(value) if isinstance(value, dict) else value for key, value in state.items()}


def take_apart(finding: Finding, optimizer: Optimizer, parameter: Tensor) -> Finding:
    """Return the finding of a non-finite weight with the operation of the step that wrote it, as far as it is known."""
    groups = [group for group in optimizer.param_groups if any(x is parameter for x in group["params"])]
    # A state may be of another make.
    with suppressing("an optimizer's step could not be taken apart"), torch.no_grad(), only_our_dispatch():
        items = optimizer.state.get(parameter, {}).items()
        state = {key: addressable(x) if isinstance(x, Tensor) else x for key, x in items}
        is_adam = all(kind.__name__ != "SGD" for kind in type(optimizer).__mro__)
        group, gradients = groups[0], list[Record]()
        if parameter.grad is not None:
            gradients = [observe(addressable(parameter.grad), f"{finding.label}.grad", "gradient")]
        rate = f"lr={float(group['lr']):g}" if "lr" in group else "no lr"
        words = f"the step of {type(optimizer).__name__}"
        if not (is_taken_apart(optimizer) and (state or gradients)):
            return replace(finding, operation=f"{words} with {rate}", operands=tuple(gradients))
        keys = [x for x in ("momentum_buffer",) if state.get(x) is not None]
        update = f"weight - lr * {keys[0] if keys else 'gradient'}"
        if is_adam:
            keys = ["exp_avg", "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
            update = f"exp_avg / ({keys[1]}.sqrt() + eps)"
        operands = [observe(state[x], f"{x}[{finding.label}]", "buffer", wanted=_COUNTED) for x in keys]
        operands += gradients
        peaks = [x.abs_max * float(group["lr"]) for x in operands if x.isfinite and x.abs_max is not None]
        if not is_adam and len(peaks) == len(operands) and max(peaks) < 1:
            return finding  # such a step leaves a finite weight finite: other code wrote it
        with_step = replace(finding, operation=f"{words}, {update} with {rate}", operands=tuple(operands))
        return _with_eps(with_step, group, state, keys[1]) if is_adam else with_step
    return finding


def _with_eps(finding: Finding, group: Mapping[str, Any], state: Mapping[str, Any], key: str) -> Finding:
    """Return the finding with the eps of Adam, and a larger one as the cure where it is 0 in the format of the state.

    The cure works if the update is finite with it, and a small multiple of lr.
    """
    root = state[key].sqrt() / math.sqrt(1 - float(group["betas"][1]) ** float(state["step"]))
    eps, format_name = float(group["eps"]), str(root.dtype).removeprefix("torch.")
    operation = f"{finding.operation} and eps={eps:g}"
    if float(torch.tensor(eps, dtype=root.dtype)):
        return replace(finding, operation=operation)
    ends = torch.finfo(root.dtype)
    # The smallest root that a square in this format has: a square below it is lost.
    smallest = math.sqrt(ends.smallest_normal * ends.eps)
    eps = max(1e-8, 10.0 ** math.floor(math.log10(smallest)))
    update = state["exp_avg"] / (root + eps)
    works = bool(update.isfinite().all()) and float(update.abs().max()) < 100
    remark = (
        f"a float32 copy of the weights for the optimizer, which keeps what {format_name} loses of squares, is a cure"
        " too; it was not tried"
    )
    operation, remarks = f"{operation}, which is 0 in {format_name}", (*finding.remarks, remark)
    cure = Cure(f"give the optimizer eps={eps:g}", works)
    return replace(finding, operation=operation, cures=(cure,), remarks=remarks)
