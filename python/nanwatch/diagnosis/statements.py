"""Statements of a function of the program, found in its source: those that led to a call, or lead on from its value.

The names of a frame keep their values. So only those statements run again that make what is asked for: a loss, or what
a function returns. None that only prints, logs or saves does, no step of an optimizer, nothing that hands out data.
"""

from __future__ import annotations

import ast
import builtins
import copy
import re
from collections import ChainMap, Counter
from collections.abc import Iterator, Sequence
from types import CodeType, NoneType
from typing import Any, NamedTuple, TypeAlias, TypeGuard

from torch import Tensor, nn
from torch.utils.data import DataLoader

from . import isolation
from .data import bad_tensors, redraw, tensors_of
from .patching import source

# Blocks down to a statement, each with its statement that covers that.
_Path: TypeAlias = list[tuple[list[ast.stmt], ast.stmt]]
# Statements behind a call that make a backward of a loss, or return a value, and that.
_Ends: TypeAlias = dict[ast.stmt, ast.expr]
# In the statements: the value of the call that they follow, and what raises the result.
VALUE, RETURN = "__nanwatch_value__", "__nanwatch_return__"
# A second call of these would take data, change an optimizer, or write something.
_NOT_TWICE = frozenset({
    "next", "input", "open", "exec", "eval", "print", "anext", "backward", "step", "zero_grad", "write", "send",
    "get_batch", "save",
})  # fmt: skip
# Methods that change what they are called on, beside those of tensors that end in an underscore.
_CHANGES = frozenset({"append", "extend", "insert", "add", "update", "setdefault", "sort", "pop"})
# Contexts in which a loss behind a call runs as the program has it. Others may time, log or open something.
_MODES = frozenset({"autocast", "enable_grad", "no_grad", "set_grad_enabled"})
# Attributes of a tensor whose values have no graph.
_DETACHES = frozenset({"detach", "data", "item"})
_JUMPS = ast.Break | ast.Continue | ast.Return
# Parts of a function that may run several times, or later.
_APART = source.FunctionNode | ast.ClassDef | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
# A call of these makes a backward, as `accelerator.backward` and Lightning's `_backward_fn` do.
_BACKWARD = re.compile("backward(?!s)")


class Refused(Exception):  # noqa: N818 - a reason, in words
    """The statements cannot run a second time."""


class Caller(NamedTuple):
    """A function of the program that is under way at a line, and has called what leads to the backward or the step.

    `names` are its own, behind which its caller has those of its parameters, as it may have deleted them. `around`: the
    call that the statements are around, as what it calls, in source, and its number. `makes_arguments`: they make what
    the call is given too. `ends_there`: they end with the call. `fresh`: names that the head of a loop binds, with the
    batch drawn again.
    """

    code: CodeType
    line: int
    names: ChainMap[str, Any]
    globals: dict[str, Any]
    fresh: dict[str, Any]
    positions: Sequence[int | None] | None = None
    around: tuple[str, int] | None = None
    makes_arguments: bool = False
    ends_there: bool = False

    def source(self) -> tuple[source.SourceFile | None, ast.AST]:
        """Return its file, None where that is not at hand, and the node of its function in it."""
        file = source.SourceFile.load(self.code.co_filename)
        top = None if file is None else source.node_of(file, self.code)
        return file, top or ast.Module([], [])


def part_of(caller: Caller, file: source.SourceFile, kept: nn.Module | None = None) -> Part | None:
    """Return the statements that led to the call under way, or are behind it; None where they make nothing."""
    top = source.node_of(file, caller.code) or ast.Module([], [])
    if caller.around is not None:
        calls = [call for text, number, call in calls_in(top) if (text, number) == caller.around]
        parts = (Part(caller).around(path, x) for x in calls for path in source.paths_to(top, x.lineno))
    else:
        parts = (Part(caller).led_to(path, kept) for path in source.paths_to(top, caller.line))
    return next((part for part in parts if part.body), None)


def is_backward(node: ast.AST) -> TypeGuard[ast.Call]:
    """Return whether the node is a call that makes a backward, by its name."""
    return isinstance(node, ast.Call) and _BACKWARD.search(source.called_name(node)) is not None


def calls_in(top: ast.AST) -> Iterator[tuple[str, int, ast.Call]]:
    """Yield the calls in the node, with the source of what they call and their number among those of the same."""
    counts = Counter[str]()
    for call in (x for x in ast.walk(top) if isinstance(x, ast.Call)):
        yield (text := ast.unparse(call.func)), counts[text], call
        counts[text] += 1


class Part:
    """Statements of a function before or behind a call, found backwards by the names that they have to make.

    `body`: they raise the loss, or what the function returns, or end with the call; [] where they make nothing.
    `reads`: values of the names that they read. `is_whole`: they make all that has a graph. Else a parameter of the
    function has one that its caller has made. `has_backward`: behind them is one. `makes_arguments`: they make a bad
    argument of the call. `data`: bad values that have no graph, by name.
    """

    def __init__(self, caller: Caller) -> None:
        self._caller, self._values = caller, caller.names
        self.kept: nn.Module | None = None
        self.body: list[ast.stmt] = []
        self.is_whole, self.has_backward, self.makes_arguments = True, False, False
        self.reads: dict[str, Any] = {}
        self.data: dict[str, Any] = {}
        self._ends: _Ends = {}
        self._bound = set[str]()  # names whose values are no longer, or not yet, those that a statement reads
        self._unknown = set[str]()  # names without a value, as those that an edit has added
        self._needs_graph = False

    def led_to(self, path: _Path, kept: nn.Module | None) -> Part:
        """Find the statements that led to the call at the end of the path.

        `kept`: the model whose calls are left out, if any: the names of their results keep their values.
        """
        self.kept, statement = kept, path[-1][1]
        if (made := self._loss_in(statement)) is None:
            return self
        self._refuse_twice(made)
        needed, earlier = self._read(made), [x for block, inner in path for x in block[: block.index(inner)]]
        before, needed = self._block(earlier, needed)
        is_computed = before or any(isinstance(x, ast.Call | ast.BinOp) for x in ast.walk(made))
        if is_computed and not needed - self._values.keys():
            # A bad parameter, one with a graph, and a list or dict of others that these statements fill.
            known = {name: self._values[name] for name in needed}
            self.is_whole = not any(_has_graph(x) for x in known.values() if not isinstance(x, list | dict))
            self.body = [*before, _raising(made, statement)]
            self.reads |= known
        return self

    def around(self, path: _Path, call: ast.Call) -> Part:
        """Find the statements that lead on from the value of a call in the path's last one to a backward or a `return`.

        A loop is left after the turn under way. Names that no statement behind the call binds keep their values, but
        for bad ones that an earlier statement made, where the arguments are to be made too.
        """
        last, caller, memo = path[-1][1], self._caller, dict[int, Any]()
        later = [x for block, inner in reversed(path) for x in block[block.index(inner) + 1 :]]
        following = copy.deepcopy([last, *later], memo)
        # These may make many calls, as `list(map(model, batches))`.
        many = [x for x in ast.walk(last) if isinstance(x, _APART | ast.While)]
        is_many = any(call in ast.walk(x) for x in many) or source.called_name(call) in dir(builtins)
        if is_many or (known := memo.get(id(call))) is None:
            return self
        given = [known.func, *known.args] if caller.makes_arguments else []
        known.func, known.args = ast.copy_location(ast.Name(VALUE, ast.Load()), call), given
        known.keywords = known.keywords if caller.makes_arguments else []
        self._values = self._values.new_child({VALUE: None})
        changed = (source.names_in(x, ast.Store) | filled_by(x, directly=True) for x in following)
        self._bound = {VALUE}.union(*changed)
        inner = [x for top in following if not isinstance(top, _APART) for x in ast.walk(top)]
        returns: _Ends = {x: x.value for x in inner if isinstance(x, ast.Return) and x.value}
        ways = [] if caller.ends_there else [*map(self._losses_of, following), returns]
        ways += [{following[0]: known}] if caller.makes_arguments else []
        for number, ends in enumerate(ways, 1):
            self._ends, self._needs_graph = ends, True  # `fake.detach()` leads to another's loss
            is_made = ends and VALUE in self._block(following[:number], set())[1]
            self._needs_graph, self.reads = False, {}
            if is_made:
                self.body, needed = self._block(following[:number], set())
                self.has_backward = number <= len(following)
                self.reads |= {name: self._values[name] for name in needed & self._values.keys()}
                break
        if self.body and caller.makes_arguments:
            self._make(path, call)
        return self

    def _make(self, path: _Path, call: ast.Call) -> None:
        """Put before the statements those that make the bad values that they read."""
        before = Part(self._caller._replace(around=None))
        bad = {name for name, x in self.reads.items() if name != VALUE and bad_tensors(x)}
        earlier = [x for block, inner in path for x in block[: block.index(inner)]]
        body, needed = before._block(earlier, bad)
        made = {name for x in body for name in source.names_in(x, ast.Store) | filled_by(x)}
        given = [*call.args, *(x.value for x in call.keywords)]
        is_computed = any(isinstance(x, ast.Call | ast.BinOp) for y in given for x in ast.walk(y))
        self.makes_arguments = is_computed or not made.isdisjoint(bad)
        self.body = [*body, *self.body]
        # The batch is drawn once more, for a name that a statement has bound anew since.
        loops = [x for _, x in path if isinstance(x, ast.For)]
        if loops and needed & bad and not (fresh := self._caller.fresh):
            fresh |= redraw(loops[-1], self._values)
        values = {name: {**self._values, **self._caller.fresh}[name] for name in needed & self._values.keys()}
        self.reads = {name: x for name, x in self.reads.items() if name not in made} | before.reads | values

    def _losses_of(self, top: ast.stmt) -> _Ends:
        """Return the loss of each statement in the node that makes a backward."""
        losses: _Ends = {}
        for statement in (x for x in ast.walk(top) if isinstance(x, ast.Expr | ast.Assign)):
            if any(map(is_backward, ast.walk(statement))) and (loss := self._loss_in(statement)) is not None:
                losses[statement] = loss
        return losses

    def _loss_in(self, statement: ast.stmt) -> ast.expr | None:
        """Return the loss: what has the method `backward`, else the only made argument of a call."""
        calls = [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
        for call in calls:
            if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
                owner = call.func.value
                if not isinstance(self.value_of(owner), Tensor | NoneType):
                    calls = [call]  # as of an accelerator
                    break
                is_call = any(isinstance(x, ast.Call) for x in ast.walk(owner))
                if not call.args or is_call or self._read(owner):
                    return owner
        arguments = [x for call in calls for x in (*call.args, *(keyword.value for keyword in call.keywords))]
        made = [argument for argument in arguments if self._read(argument)]
        return made[0] if len(made) == 1 else None

    def _read(self, node: ast.AST) -> set[str]:
        """Return the names in the node that earlier statements have to make. Keep the values of the others."""
        needed, is_behind = set(), self._caller.around is not None
        detached = [x for x in ast.walk(node) if isinstance(x, ast.Attribute) and x.attr in _DETACHES]
        nodes = {*ast.walk(node)}.difference(*map(ast.walk, detached))
        with_graph = {x.id for x in nodes if isinstance(x, ast.Name)}
        for name in source.names_in(node, ast.Load):
            value, is_free = self._values.get(name), name not in with_graph
            if is_free and self._needs_graph:
                continue
            tensors = [] if is_behind else tensors_of(value)
            # A statement may have bound a deleted parameter anew, as Trainer's does that prepares the inputs.
            is_gone = name in self._caller.code.co_varnames and name not in self._values.maps[0]
            # A module keeps its weights: made anew, it would have others.
            is_bound = name in self._bound and not isinstance(value, nn.Module)
            # The statement that made a bad value is sought, unless samples are. Weights have none.
            given = [x for x in tensors if is_free or not x.requires_grad]
            is_bad = self.kept is None and any(map(bad_tensors, given))
            self.data |= {name: value} if is_bad else {}
            has_graph = not is_free and any(x.grad_fn is not None for x in tensors)
            if is_bound or is_bad or has_graph or (is_gone and not is_behind):
                needed.add(name)
            elif name in self._values:
                self.reads[name] = value
            elif name not in self._caller.globals:
                self._unknown.add(name)
        return needed

    def _block(self, statements: list[ast.stmt], needed: set[str]) -> tuple[list[ast.stmt], set[str]]:
        """Return those of the statements that make the needed names, and the names that they need themselves."""
        body: list[ast.stmt] = []
        for statement in reversed(statements):
            later, bound = set(self._bound), source.names_in(statement, ast.Store)
            filled = self._filled(statement, needed)
            wanted = bound & (needed | self._unknown) | filled
            is_end = not self._ends.keys().isdisjoint(ast.walk(statement))
            # The statements of a block bind one after the other, those of a loop in any order.
            if not wanted or not isinstance(statement, ast.With | ast.Try | ast.If):
                self._bound |= bound | filled
            if not (wanted or is_end):
                continue
            is_kept = self._calls_kept(statement)
            try:
                if is_kept:
                    raise self._refused(statement)
                made = {name for name in filled if not isinstance(self._values.get(name), nn.Module)}
                kept, needed = self._statement(statement, needed | made)
            except Refused as reason:
                values = {name: self._values[name] for name in wanted & self._values.keys()}
                is_graph = not is_kept and any(map(_has_graph, values.values()))
                # Bad data stays as it was handed out. A branch that is not taken may have what is lost.
                stand_in, needed = f"raise RuntimeError({str(reason)!r})", needed - wanted
                if not (self._ends or wanted & later or wanted - values.keys() or is_graph):
                    self.reads, stand_in = self.reads | values, "pass"
                kept = ast.copy_location(ast.parse(stand_in).body[0], statement)
            self._bound |= bound | filled
            body = [kept, *body]
        return body, needed

    def _filled(self, statement: ast.stmt, needed: set[str]) -> set[str]:
        """Return those of the needed and the read names whose values the statement changes in place.

        A tensor or a module that is only read already holds its changes. They are not repeated.
        """
        read = {name: self._values.get(name) for name in self.reads.keys() - needed}
        modules = {name for name, value in read.items() if isinstance(value, nn.Module)}
        objects = {name for name, value in read.items() if not isinstance(value, Tensor | nn.Module)}
        filled = filled_by(statement, directly=self._caller.around is not None)
        return filled & (needed | objects) | filled_by(statement, plainly=True) & modules

    def _statement(self, statement: ast.stmt, needed: set[str]) -> tuple[ast.stmt, set[str]]:
        """Return the statement as it runs again, and the names that have to be made before it."""
        made: Any = copy.copy(statement)
        header: list[ast.AST] = [statement]
        if isinstance(statement, ast.With | ast.Try):
            # The body of a `try` raised nothing.
            body, needed = self._block([*statement.body, *getattr(statement, "orelse", ())], needed)
            items = getattr(statement, "items", [])
            if self._ends:
                items = [x for x in items if source.called_name(x.context_expr) in _MODES]
            block = ast.With(items, body) if items else ast.If(ast.Constant(True), body, [])
            made, header = ast.copy_location(block, statement), [x.context_expr for x in items]
        elif isinstance(statement, ast.If):
            body, first = self._block(statement.body, needed)
            made.orelse, second = self._block(statement.orelse, needed)
            made.body, header = body or [ast.copy_location(ast.Pass(), statement)], [statement.test]
            needed = first | second
        # A DataLoader would hand out other data, and an iterator would be further on than before.
        elif isinstance(statement, ast.For) and not any(
            isinstance(self.value_of(x), Iterator | DataLoader) for x in ast.walk(statement.iter)
        ):
            # A second time, as an iteration reads what an earlier one has made.
            body, needed = self._block(statement.body, needed | self._block(statement.body, needed)[1])
            if statement.orelse or any(isinstance(x, _JUMPS) for x in ast.walk(statement)):
                if self._ends:  # it may print or save
                    raise self._refused(statement)
                self._refuse_twice(statement)
            else:
                made.body = body
            needed, header = needed - source.names_in(statement.target, ast.Store), [statement.iter]
        elif statement in self._ends:
            made, header = _raising(self._ends[statement], statement), [self._ends[statement]]
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr):
            needed = needed - source.names_in(statement, ast.Store)
        elif not isinstance(statement, ast.AugAssign):
            raise self._refused(statement)
        self._refuse_twice(*header)
        return made, needed.union(*map(self._read, header))

    def _calls_kept(self, statement: ast.stmt) -> bool:
        """Return whether the statement assigns what a call of the kept model, or of a part of it, returned."""
        modules = [] if self.kept is None or not isinstance(statement, ast.Assign) else self.kept.modules()
        callees = [self.value_of(x.func) for x in ast.walk(statement) if isinstance(x, ast.Call)]
        return any(module is callee for module in modules for callee in callees[:1])  # the outermost

    def value_of(self, node: ast.AST) -> Any:
        """Return the value of `name` or `name.attribute`, None where it is not known."""
        if isinstance(node, ast.Name):
            return self._values.get(node.id, self._caller.globals.get(node.id))
        if not isinstance(node, ast.Attribute):
            return None
        owner = getattr(self.value_of(node.value), "__dict__", {})
        return {**owner, **owner.get("_modules", {})}.get(node.attr)

    def _refuse_twice(self, *nodes: ast.AST) -> None:
        for node in (inner for top in nodes for inner in ast.walk(top)):
            is_once = isinstance(node, ast.Await | ast.Yield | ast.YieldFrom)
            if is_once or (isinstance(node, ast.Call) and self._changes_more(node)):
                raise self._refused(node)

    def _changes_more(self, call: ast.Call) -> bool:
        """Return whether a second call would do more than make a value. A program's own `step` may return a loss."""
        if (name := source.called_name(call)) != "step" or not isolation.is_child():
            return name in _NOT_TWICE
        function = getattr(self.value_of(getattr(call.func, "value", call)), "step", None)
        return str(getattr(function, "__module__", "torch")).partition(".")[0] == "torch"

    def _refused(self, node: Any) -> Refused:
        return Refused(f"line {node.lineno} of {self._caller.code.co_filename} should not run a second time")


def _raising(value: ast.expr, statement: ast.stmt) -> ast.stmt:
    """Return what ends the statements with this value in the place of one, also inside a block."""
    raised = ast.Call(ast.Name(RETURN, ast.Load()), [value], [])
    return ast.copy_location(ast.Raise(raised), statement)


def _has_graph(value: Any) -> bool:
    return any(x.grad_fn is not None for x in tensors_of(value))


def filled_by(statement: ast.stmt, *, plainly: bool = False, directly: bool = False) -> set[str]:
    """Return the names whose values the statement changes in place: `p.clamp_()`, `s.den = x`, `losses["a"] = x`.

    `plainly` leaves those that an assignment with an operator, or a method, changes; `directly` those of which a method
    changes a part, as `self.board.update()` may write a file.
    """
    filled, nodes = set[str](), [*ast.walk(statement)]
    steps = [x.target for x in nodes if plainly and isinstance(x, ast.AugAssign)]
    for node in nodes:
        is_stored = isinstance(getattr(node, "ctx", None), ast.Store) and node not in steps
        changed: Any = node if is_stored else None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not plainly:
            name, is_part = node.func.attr, isinstance(node.func.value, ast.Attribute)
            is_change = name in _CHANGES or (name.endswith("_") and not name.endswith("__"))
            changed = node.func if is_change and not (directly and is_part) else None
        owner = changed
        while isinstance(owner, ast.Attribute | ast.Subscript):
            owner = owner.value
        filled |= {owner.id} if isinstance(owner, ast.Name) and owner is not changed else set()
    return filled
