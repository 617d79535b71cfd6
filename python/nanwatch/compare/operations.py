"""Operations of a part of a run, with fingerprints of their operands and results, and the first that differs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils.data
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..numerics.ranges import fingerprint
from ..numerics.readable import only_our_dispatch
from ..recording.walk import leaves
from ..util.visible import users_frame

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout)
_LOADER = str(torch.utils.data.__path__[0])
# File, line, module and class.
_Where = tuple[str, int, str, str]


class OperationPrint(NamedTuple):
    """One operation: in which module, at which line, and the fingerprints of what it was given and made.

    `numbers` are the arguments that are no tensors, as text. `is_random`: it draws random numbers, with `has_generator`
    from a generator that it was given. `in_loader`: a data loader of PyTorch runs it.
    """

    name: str
    file: str
    line: int
    module: str
    class_name: str
    operands: Sequence[int]
    numbers: str
    results: Sequence[int]
    is_random: bool
    has_generator: bool
    in_loader: bool
    in_backward: bool


class OperationLog(TorchDispatchMode):
    """Mode that records the operations of its thread while `active`. No result is changed."""

    supports_higher_order_operators = True

    def __init__(self, current: Callable[[], tuple[str, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.prints: list[OperationPrint] = []
        self.active = False
        self._current = current
        # The place and module of the forward operation behind each node of the autograd graph.
        self._forward: dict[int, _Where] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and record it."""
        kwargs = kwargs or {}
        if not self.active or not isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        where, in_loader, in_backward = self._place()
        names = [argument.name for argument in func._schema.arguments]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        arguments = func._schema.arguments
        written = [x.name for x in arguments if x.alias_info and x.alias_info.is_write]
        # An operation in place reads what it writes to, unless its name says that it fills it.
        fills = written[:1] if func._schema.name.endswith(_FILLING) else []
        operands = _bits([value for name, value in given.items() if name not in fills])
        result = func(*args, **kwargs)
        # `empty` leaves memory as it was: its values differ from run to run, and count once an operation reads them.
        is_unwritten = func._schema.name.startswith(("aten::empty", "aten::new_empty"))
        results = [] if is_unwritten else _bits([result, *(given.get(name) for name in written)])
        numbers = (leaf for name, value in given.items() for leaf in leaves(value, name))
        self.prints.append(
            OperationPrint(
                str(func),
                *where,
                operands,
                ", ".join(f"{label}={x!r}" for label, x in numbers if isinstance(x, _PLAIN)),
                results,
                torch.Tag.nondeterministic_seeded in func.tags,
                any(isinstance(value, torch.Generator) for value in given.values()),
                in_loader,
                in_backward,
            )
        )
        return result

    def _place(self) -> tuple[_Where, bool, bool]:
        frame = users_frame(sys._getframe(1))
        file, line = ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
        in_loader = by_engine = False
        inner = sys._getframe(1)
        while inner is not None and inner is not frame:
            in_loader = in_loader or inner.f_code.co_filename.startswith(_LOADER)
            # Otherwise a hook of the program, or a backward that it defines, runs the operation.
            by_engine = by_engine or inner.f_code.co_name == "_engine_run_backward"
            inner = inner.f_back  # type: ignore[assignment]
        where = (file, line, *self._current())
        node = torch._C._current_autograd_node()
        if node is None:
            # The node of an operation has been made just before it comes here. A later one without a node sees it too.
            self._forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, where)
            return where, in_loader, False
        forward = self._forward.get(node._sequence_nr(), where)
        return (forward if by_engine else (file, line, *forward[2:])), in_loader, by_engine


_FILLING = ("copy_", "fill_", "zero_", "set_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_")


def _bits(values: Sequence[Any]) -> list[int]:
    bits = []
    with only_our_dispatch(), torch.no_grad():
        for _, x in leaves(list(values), "", objects=False):
            if isinstance(x, Tensor):
                try:
                    bits.append(fingerprint(x))
                except TypeError:  # sparse, nested, meta
                    bits.append(0)
    return bits


class OperationDifference(NamedTuple):
    """First operation that two runs do not have alike. `how` is in what: "path", "numbers", "operands", "results"."""

    how: str
    a: OperationPrint
    b: OperationPrint | None


def first_operation(
    a: Sequence[OperationPrint], b: Sequence[OperationPrint], target: int
) -> OperationDifference | None:
    """Return the operation with which the difference of a tensor begins, whose bits in run `a` are `target`.

    It is the first with a difference on the way from a tensor to the operation that made it, by their bits. Others may
    differ and have no part in it. Where no operation made the tensor it is the first of all that differs.
    """
    paths = ([(x.name, x.file, x.line, len(x.operands)) for x in run] for run in (a, b))
    pairs = enumerate(zip(*paths, strict=False))
    same = next((i for i, (of_a, of_b) in pairs if of_a != of_b), min(len(a), len(b)))

    def maker(bits: int, before: int) -> int | None:
        places = range(before - 1, -1, -1)
        return next((i for i in places if bits in a[i].results and a[i].results != b[i].results), None)

    begun: list[int] = []
    ahead, seen = [(target, same)], set[int]()
    while ahead:
        i = maker(*ahead.pop())
        if i is not None and i not in seen:
            seen.add(i)
            given = [(x, i) for x, y in zip(a[i].operands, b[i].operands, strict=True) if x != y]
            if a[i].numbers != b[i].numbers or not any(maker(*operand) is not None for operand in given):
                begun.append(i)
            ahead += given
    if begun:
        # A data loader draws an order and hands it on in Python, where no operation shows the way.
        drawn = (
            i for i in range(min(begun)) if a[i].in_loader and a[i].is_random and a[i].results != b[i].results
        )
        i = next(drawn, min(begun))
        return OperationDifference(_how(a[i], b[i]), a[i], b[i])
    for of_a, of_b in zip(a[:same], b, strict=False):
        if how := _how(of_a, of_b):
            return OperationDifference(how, of_a, of_b)
    if len(a) == same == len(b):
        return None
    ends = [run[same] for run in (a, b) if same < len(run)]
    return OperationDifference("path", ends[0], ends[1] if len(ends) > 1 else None)


def _how(a: OperationPrint, b: OperationPrint) -> str:
    for how in ("numbers", "operands", "results"):
        if getattr(a, how) != getattr(b, how):
            return how
    return ""
