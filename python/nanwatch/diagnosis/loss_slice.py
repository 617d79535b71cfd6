"""Which statements of a function computed a loss: the backward slice of the expression whose `backward()` is under way.

The names of a frame keep their values until the backward. So of its statements only those run again that made a value
from the model's outputs or changed one, and no more than its own: no step of an optimizer, nothing that hands out data.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import CodeType, FunctionType, MappingProxyType
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..recording.observe import observe
from .child_process import in_child
from .operation import tensors_in
from .patching.code_swap import node_of
from .patching.source import FunctionNode, SourceFile, called_name, names_in, path_to

RESULT = "__nanwatch_loss__"
# A second call of these would take data, change an optimizer, or write something.
_NOT_TWICE = frozenset({
    "next", "input", "open", "exec", "eval", "print", "anext", "backward", "step", "zero_grad", "write", "send",
    "get_batch", "save", "autograd", "grad",
})  # fmt: skip
# Methods that change what they are called on, beside those of tensors that end in an underscore.
_CHANGES = frozenset({
    "append", "appendleft", "extend", "extendleft", "insert", "add", "update", "setdefault", "sort", "reverse", "pop",
    "popleft", "popitem", "clear", "remove", "discard",
})  # fmt: skip
# Contexts that may be entered once more: they change how PyTorch computes, and end with the block.
_CONTEXTS = frozenset({
    "autocast", "no_grad", "enable_grad", "set_grad_enabled", "inference_mode", "sdpa_kernel", "record_function",
    "nullcontext", "device", "span", "compute_loss_context_manager", "autocast_smart_context_manager",
})  # fmt: skip


class Refused(Exception):  # noqa: N818 - a reason, in words
    """The statements cannot run a second time."""


class Caller(NamedTuple):
    """A function of the program that is under way, and has called what leads to the backward."""

    code: CodeType
    line: int
    # The line and column at which the expression under way ends; Python 3.10 does not tell.
    end: tuple[int | None, int | None]
    names: dict[str, Any]
    globals: dict[str, Any]
    # Parameters as they were handed over, as far as that can be told.
    handed: Mapping[str, Any] = MappingProxyType({})


class Cut(NamedTuple):
    """The statements that computed a loss."""

    body: list[ast.stmt]
    # Names that the statements read, with their values.
    reads: dict[str, Any]
    last_line: int


def body_of(caller: Caller, file: SourceFile) -> FunctionNode | ast.Module | None:
    """Return the node that the caller's code is compiled from."""
    return file.tree if caller.code.co_name == "<module>" else node_of(file.tree, caller.code)


def cut_of(caller: Caller, file: SourceFile, is_behind: Callable[[Any], bool]) -> Cut | None:
    """Return the statements, with those that made a bad value which has no graph, such as a target, if they may run."""
    with suppress(Refused):
        if (found := _Slice(caller, file, is_behind, follows_bad=True).cut()) is not None:
            return found
    return _Slice(caller, file, is_behind, follows_bad=False).cut()


class _Slice:
    """The statements of one frame that made the values of an expression after the model's forward."""

    def __init__(
        self, caller: Caller, file: SourceFile, is_behind: Callable[[Any], bool], *, follows_bad: bool
    ) -> None:
        self._caller = caller
        self._file = file
        self._is_behind = is_behind
        self._follows_bad = follows_bad
        self._reads: dict[str, Any] = {}
        # The names that a statement after the present one binds: their values are no longer those that it read.
        self._bound: set[str] = set()
        # The names of values from elsewhere that a statement changes.
        self._changed: set[str] = set()

    def cut(self) -> Cut | None:
        """Return the statements; None where the frame was only handed the loss."""
        top = body_of(self._caller, self._file)
        if top is None or isinstance(top, ast.Lambda):
            return None
        path = path_to(top, self._caller.line)
        value = None if not path else self._expression(path[-1][1])
        if value is None:
            return None
        is_computed = any(isinstance(one, ast.Call | ast.BinOp) for one in ast.walk(value))
        needed = self._read(value)
        statement = path[-1][1]
        result = ast.copy_location(ast.Assign([ast.Name(RESULT, ast.Store())], value), statement)
        body: list[ast.stmt] = [result]
        for block, inner in reversed(path):
            before = block[: block.index(inner)]
            made, needed = self._block(before, needed)
            body = [*made, *body]
            if not needed:
                break
        handed = {
            name: x for name, x in self._caller.handed.items() if name in needed and not self._is_made(x)
        }
        self._reads.update(handed)
        needed -= handed.keys()
        # What is changed here and made elsewhere is as the batch found it.
        elsewhere = {name for name in needed & self._changed if name in self._caller.names}
        self._reads.update((name, self._caller.names[name]) for name in elsewhere)
        if needed - elsewhere or (len(body) == 1 and not is_computed):
            return None
        self._refuse_twice(value)
        return Cut(body, self._reads, statement.end_lineno or statement.lineno)

    def _expression(self, statement: ast.stmt) -> ast.expr | None:
        """Return the loss in the call under way: what has the method `backward`, else the arguments."""
        call = call_under_way(statement, self._caller, "backward")
        if call is None:
            return None
        if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
            owner = call.func.value
            if not call.args or self._read(owner) or any(isinstance(x, ast.Call) for x in ast.walk(owner)):
                return owner
        given = [one for one in call.args if not isinstance(one, ast.Starred)]
        given += [one.value for one in call.keywords if one.arg is not None]
        wanted = [one for one in given if self._read(one)]
        return wanted[0] if len(wanted) == 1 else None

    def _read(self, *nodes: ast.AST) -> set[str]:
        """Return the names in these nodes that earlier statements have to make. Keep those that have their values."""
        values, found = self._caller.names, set()
        for name in {name for node in nodes for name in names_in(node, ast.Load)}:
            is_gone = name not in values and name in self._caller.code.co_varnames
            if name in self._bound or is_gone or self._is_made(values.get(name)):
                found.add(name)
            elif name in values:
                self._reads[name] = values[name]
        return found

    def _is_made(self, value: Any) -> bool:
        """Return whether the value was computed from the model's outputs, or is bad and its statement is sought."""
        tensors = tensors_in(value)
        if any(x.grad_fn is not None and self._is_behind(x.grad_fn) for x in tensors):
            return True
        return self._follows_bad and any(
            not x.requires_grad and observe(x, "", "output").is_fault for x in tensors
        )

    def _block(self, statements: list[ast.stmt], needed: set[str]) -> tuple[list[ast.stmt], set[str]]:
        """Return those of the statements that make the needed names, and the names that they need themselves."""
        body: list[ast.stmt] = []
        for one in reversed(statements):
            # Also those of which it sets an item.
            names = names_in(one, ast.Store) | {
                name
                for x in ast.walk(one)
                if isinstance(x, ast.Subscript) and isinstance(x.ctx, ast.Store)
                for name in names_in(x.value, ast.Load)
            }
            self._bound |= names
            changed = self._changed_by(one) & (needed | self._reads.keys())
            self._changed |= changed
            if names & needed or changed:
                kept, needed = self._statement(one, needed | changed)
                body = [*kept, *body]
        return body, needed

    def _changed_by(self, one: ast.stmt) -> set[str]:
        """Return the names of values that the statement changes without binding them: `p.clamp_()`, `s.den = x`."""
        found: set[str] = set()
        for x in ast.walk(one):
            if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store):
                found |= _base(x)
        call = one.value if isinstance(one, ast.Expr) else None
        if not isinstance(call, ast.Call):
            return found
        name = called_name(call)
        is_in_place = name.endswith("_") and not name.endswith("__")
        if isinstance(call.func, ast.Attribute) and (is_in_place or name in _CHANGES):
            found |= _base(call.func.value)
        given = [*call.args, *(x.value for x in call.keywords)]
        if is_in_place or any(x.arg in ("inplace", "out") for x in call.keywords):
            found |= {x.id for x in given if isinstance(x, ast.Name)}
        elif isinstance(call.func, ast.Name):  # a helper that fills what it is given
            filled = {x.id for x in given if isinstance(x, ast.Name)}
            found |= {x for x in filled if _may_be_filled(self._caller.names.get(x))}
        return found

    def _statement(self, one: ast.stmt, needed: set[str]) -> tuple[list[ast.stmt], set[str]]:
        if isinstance(one, ast.Assign | ast.AnnAssign) and one.value is not None:
            targets = one.targets if isinstance(one, ast.Assign) else [one.target]
            plain = self._bind(one, targets)
            self._refuse_twice(one.value)
            # Without an annotation, which a function does not evaluate.
            made = ast.copy_location(ast.Assign([*targets], one.value), one)
            return [made], (needed - plain) | self._read(one.value)
        if isinstance(one, ast.AugAssign) and isinstance(one.target, ast.Name):
            self._refuse_twice(one.value)
            # Not in place: the tensor or the list may be the program's.
            left = ast.copy_location(ast.Name(one.target.id, ast.Load()), one.target)
            value = ast.copy_location(ast.BinOp(left, one.op, one.value), one)
            made = ast.copy_location(ast.Assign([one.target], value), one)
            return [made], needed | {one.target.id} | self._read(one.value)
        if isinstance(one, ast.Expr):
            self._refuse_twice(one.value)
            return [one], needed | self._read(one.value)
        if isinstance(one, ast.AugAssign):
            self._refuse_twice(one.target, one.value)
            return [one], needed | self._read(one.target, one.value)
        if isinstance(one, ast.For):
            self._refuse_twice(one)
            self._changed |= names_in(one, ast.Store)  # which it may read only after it has bound them
            return [one], (needed | self._read(one)) - names_in(one.target, ast.Store)
        if isinstance(one, ast.With):
            contexts = [item.context_expr for item in one.items]
            # In a child nobody waits for a lock that it takes.
            if not in_child() and any(
                not isinstance(x, ast.Call) or called_name(x) not in _CONTEXTS for x in contexts
            ):
                raise self._refused(one)
            body, needed = self._block(one.body, needed)
            return [ast.copy_location(ast.With(one.items, body), one)], needed | self._read(*contexts)
        if isinstance(one, ast.If):
            self._refuse_twice(one.test)
            body, first = self._branch(one.body, needed)
            others, second = self._branch(one.orelse, needed)
            chosen = ast.If(one.test, body or [ast.copy_location(ast.Pass(), one)], others)
            return [ast.copy_location(chosen, one)], first | second | self._read(one.test)
        raise self._refused(one)

    def _bind(self, one: ast.Assign | ast.AnnAssign, targets: Sequence[ast.expr]) -> set[str]:
        """Return the names that an assignment binds."""
        plain: set[str] = set()
        for target in targets:
            if isinstance(target, ast.Name | ast.Tuple | ast.List):
                plain |= names_in(target, ast.Store)
            elif not isinstance(target, ast.Subscript | ast.Attribute):
                raise self._refused(one)
        return plain

    def _branch(self, statements: list[ast.stmt], needed: set[str]) -> tuple[list[ast.stmt], set[str]]:
        """Return the block; one that may not run twice raises instead, as the condition may choose the other."""
        try:
            return self._block(statements, needed)
        except Refused as reason:
            return ast.parse(f"raise RuntimeError({str(reason)!r})").body, needed

    def _refuse_twice(self, *nodes: ast.AST) -> None:
        for node in nodes:
            for one in ast.walk(node):
                name = called_name(one) if isinstance(one, ast.Call) else ""
                is_once = isinstance(one, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom)
                if is_once or name in _NOT_TWICE:
                    raise self._refused(one)

    def _refused(self, node: ast.AST) -> Refused:
        line = getattr(node, "lineno", 0)
        return Refused(f"line {line} of {self._caller.code.co_filename} should not run a second time")


def _base(node: ast.AST) -> set[str]:
    """Return the name at the left of `name.attribute[item]`, as a set."""
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def _may_be_filled(value: Any) -> bool:
    """Return whether a function that gets the value may put something in it."""
    return isinstance(value, list | dict | set) or (
        hasattr(value, "__dict__") and not isinstance(value, Tensor | nn.Module | type | FunctionType)
    )


def call_under_way(statement: ast.stmt, caller: Caller, name: str) -> ast.Call | None:
    """Return the call of the statement that has not returned; without its place, the only one of this name."""
    calls = [one for one in ast.walk(statement) if isinstance(one, ast.Call)]
    if caller.end[0] is not None:
        calls = [one for one in calls if (one.end_lineno, one.end_col_offset) == caller.end]
    else:
        calls = [one for one in calls if called_name(one) == name]
    return calls[0] if len(calls) == 1 else None
