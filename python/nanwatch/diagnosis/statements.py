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
from collections.abc import Iterable, Iterator, Sequence
from types import CodeType
from typing import Any, NamedTuple, TypeAlias, TypeGuard

from torch import Tensor, nn
from torch.utils.data import DataLoader

from . import isolation
from .data import bad_tensors, redraw, tensors_of
from .patching import source

# Blocks down to a statement, each with its statement that covers that.
_Path: TypeAlias = list[tuple[list[ast.stmt], ast.stmt]]
# In the statements: what makes the value of the call that they follow, and what ends them with a loss, or a value.
VALUE, LOSS, RETURN = "__nanwatch_value__", "__nanwatch_loss__", "__nanwatch_return__"
# A second call of these would take data, change an optimizer, or write something.
_NOT_TWICE = frozenset({
    "next", "input", "open", "exec", "eval", "print", "anext", "backward", "step", "zero_grad", "write", "send",
    "get_batch", "save",
})  # fmt: skip
# Methods that change what they are called on, beside those of tensors that end in an underscore.
_CHANGES = frozenset({"append", "extend", "insert", "add", "update", "setdefault", "sort", "pop"})
# Attributes of a tensor whose values have no graph.
_DETACHES = frozenset({"detach", "data", "item"})
# Statements that run again. What they are besides their blocks is an attribute of those that have blocks.
_HEADERS = {ast.With: "items", ast.If: "test", ast.For: "iter", ast.While: "test"}
_PLAIN = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Expr
_IN_ORDER, _LOOPS = ast.With | ast.If, ast.For | ast.While
_ONCE = "should not run a second time"
# Parts of a function that may run several times, or later.
_APART = source.FunctionNode | ast.ClassDef | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
# A call of these makes a backward, as `accelerator.backward` and Lightning's `_backward_fn` do.
_BACKWARD = re.compile("backward(?!s)")


class Caller(NamedTuple):
    """A function of the program that is under way at a line, and has called what leads to the backward or the step.

    `names` are its own, behind which its caller has those of its parameters, as it may have deleted them. `around`: the
    call that the statements are around, as what it calls, in source, and its number. `makes_arguments`: they make what
    the call is given too. `fresh`: names that the head of a loop binds, with the batch drawn again.
    """

    code: CodeType
    line: int
    names: ChainMap[str, Any]
    globals: dict[str, Any]
    fresh: dict[str, Any]
    positions: Sequence[int | None] | None = None
    around: tuple[str, int] | None = None
    makes_arguments: bool = False

    def source(self) -> tuple[source.SourceFile | None, ast.AST]:
        """Return its file, None where that is not at hand, and the node of its function in it."""
        file = source.SourceFile.load(self.code.co_filename)
        top = None if file is None else source.node_of(file, self.code)
        return file, top or ast.Module([], [])

    def value_of(self, node: ast.AST | None) -> Any:
        """Return the value of `name` or `name.attribute`, None where it is not known."""
        if isinstance(node, ast.Name):
            return self.names.get(node.id, self.globals.get(node.id))
        if not isinstance(node, ast.Attribute):
            return None
        owner = getattr(self.value_of(node.value), "__dict__", {})
        return {**owner, **owner.get("_modules", {})}.get(node.attr)


def part_of(caller: Caller, file: source.SourceFile, kept: nn.Module | None = None) -> Part | None:
    """Return the statements that led to the call under way, or are around it; None where they make nothing.

    `kept`: the model whose calls are left out, if any: the names of their results keep their values.
    """
    top = source.node_of(file, caller.code) or ast.Module([], [])
    calls: list[ast.Call | None] = [None]
    if caller.around is not None:
        calls = [call for text, number, call in calls_in(top) if (text, number) == caller.around]
    ways = ((path, x) for x in calls for path in source.paths_to(top, x.lineno if x else caller.line))
    return next((part for way in ways if (part := Part(caller, kept, *way)).body), None)


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
    """Statements of a function before or around a call, found backwards by the names that they have to make.

    `body`: they end with a loss, or what the function returns, or the call; [] where they make nothing.
    `reads`: values of the names that they read. `is_whole`: they make all that has a graph. Else a parameter of the
    function has one that its caller has made. `has_backward`: behind them is one. `makes_arguments`: they make a bad
    argument of the call. `data`: bad values that have no graph, by name.
    """

    def __init__(self, caller: Caller, kept: nn.Module | None, path: _Path, call: ast.Call | None) -> None:
        self._caller, self._names, self.kept = caller, caller.names, kept
        self.body: list[ast.stmt] = []
        self.is_whole, self.has_backward, self.makes_arguments = True, False, False
        self.reads: dict[str, Any] = {}
        self.data: dict[str, Any] = {}
        self._ends: dict[ast.AST, ast.stmt] = {}  # where they end or jump, with what does so
        self._bound = set[str]()  # names whose values are no longer, or not yet, those that a statement reads
        earlier, last = [x for block, inner in path for x in block[: block.index(inner)]], path[-1][1]
        if call is not None:
            later = [x for block, inner in reversed(path) for x in block[block.index(inner) + 1 :]]
            self._lead_on(last, later, call)
            if self.body and caller.makes_arguments:
                self._make(earlier, call, [x for _, x in path if isinstance(x, ast.For)])
        elif (loss := self._loss_in(last)) is not None:
            self._ends[last] = _ending(RETURN, loss)
            body, needed = self._block([*earlier, last], set())
            self._keep(needed)
            # A bad parameter, one with a graph, and a list or dict of others that these statements fill.
            left = [x for x in map(self._names.get, needed) if not isinstance(x, list | dict)]
            self.is_whole = not any(map(_has_graph, left))
            is_computed = body[1:] or any(isinstance(x, ast.Call | ast.BinOp) for x in ast.walk(loss))
            self.body = body if is_computed else []

    def _keep(self, needed: set[str]) -> None:
        """Let the names keep their values, as no statement makes them."""
        self.reads |= {name: self._names[name] for name in needed & self._names.keys()}

    def _lead_on(self, last: ast.stmt, later: list[ast.stmt], call: ast.Call) -> None:
        """Find the statements that lead on from the value of a call in the last one to a backward or a `return`.

        A loop is left after the turn under way.
        """
        makes_arguments, memo = self._caller.makes_arguments, dict[int, Any]()
        following = copy.deepcopy([last, *later], memo)
        # These may make many calls, as `list(map(model, batches))`.
        many = [x for x in ast.walk(last) if isinstance(x, _APART | ast.While)]
        is_many = any(call in ast.walk(x) for x in many) or source.called_name(call) in dir(builtins)
        if is_many or (known := memo.get(id(call))) is None:
            return
        known.args = [known.func, *known.args] if makes_arguments else []
        known.keywords = known.keywords if makes_arguments else []
        known.func = ast.copy_location(ast.Name(VALUE, ast.Load()), call)
        self._bound = {VALUE}.union(*(source.names_in(x, ast.Store) | filled_by(x) for x in following))
        for x in (x for top in following if not isinstance(top, _APART) for x in ast.walk(top)):
            if isinstance(x, ast.Return) and x.value:
                self._ends[x] = _ending(RETURN, x.value)
            elif isinstance(x, _PLAIN) and any(map(is_backward, ast.walk(x))):
                self.has_backward = True
                if (loss := self._loss_in(x)) is not None:
                    self._ends[x] = _ending(LOSS, loss)
        self.body, needed = self._block(following, set())
        if VALUE not in needed:
            self._ends = {following[0]: _ending(RETURN, known)}
            self.body, needed = self._block(following[:1], set()) if makes_arguments else ([], set())
        self._keep(needed)

    def _make(self, earlier: list[ast.stmt], call: ast.Call, loops: list[ast.For]) -> None:
        """Put before the statements those that make the bad values that they read."""
        later, fresh, self.reads, self._bound = self.reads, self._caller.fresh, {}, set()
        bad = {name for name, x in later.items() if bad_tensors(x)}
        body, needed = self._block(earlier, bad)
        made = {name for x in body for name in source.names_in(x, ast.Store) | filled_by(x)}
        given = [*call.args, *(x.value for x in call.keywords)]
        is_computed = any(isinstance(x, ast.Call | ast.BinOp) for y in given for x in ast.walk(y))
        self.makes_arguments = is_computed or not made.isdisjoint(bad)
        self.body = [*body, *self.body]
        # The batch is drawn once more, for a name that a statement has bound anew since.
        if loops and needed & bad and not fresh:
            fresh |= redraw(loops[-1], self._names)
        self._names = self._names.new_child(fresh)
        self._keep(needed)
        self.reads = {name: x for name, x in later.items() if name not in made} | self.reads

    def _loss_in(self, statement: ast.stmt) -> ast.expr | None:
        """Return the loss: what has the method `backward`, or is given to a call, and has to be made."""
        for call in (x for x in ast.walk(statement) if isinstance(x, ast.Call)):
            given = [*call.args, *(x.value for x in call.keywords)]
            if isinstance(call.func, ast.Attribute) and call.func.attr == "backward":
                given = [call.func.value, *given]  # also an accelerator, which nothing makes
            for part in given:
                is_computed = is_backward(call) and any(isinstance(x, ast.Call) for x in ast.walk(part))
                if is_computed or self._needed(part):
                    return part
        return None

    def _needed(self, node: ast.AST) -> set[str]:
        """Return the names in the node that earlier statements have to make. Keep the values of the others."""
        needed = set[str]()
        detached = [x for x in ast.walk(node) if isinstance(x, ast.Attribute) and x.attr in _DETACHES]
        nodes = {*ast.walk(node)}.difference(*map(ast.walk, detached))
        with_graph = {x.id for x in nodes if isinstance(x, ast.Name)}
        for name in source.names_in(node, ast.Load):
            value, is_free = self._names.get(name), name not in with_graph
            tensors = tensors_of(value)
            # A statement may have bound a deleted parameter anew, as Trainer's does that prepares the inputs.
            is_gone = name in self._caller.code.co_varnames and name not in self._names.maps[0]
            # A module keeps its weights: made anew, it would have others.
            is_bound = name in self._bound and not isinstance(value, nn.Module)
            # The statement that made a bad value is sought, unless samples are. Weights have none.
            given = [x for x in tensors if is_free or not x.requires_grad]
            is_bad = self.kept is None and any(map(bad_tensors, given))
            self.data |= {name: value} if is_bad else {}
            if is_bound or is_bad or is_gone or (not is_free and _has_graph(value)):
                needed.add(name)
            elif name in self._names:
                self.reads[name] = value
            elif name not in self._caller.globals:
                needed.add(name)  # which an edit has added
        return needed

    def _block(self, statements: list[ast.stmt], needed: set[str]) -> tuple[list[ast.stmt], set[str]]:
        """Return those of the statements that make the needed names, and the names that they need themselves."""
        body: list[ast.stmt] = []
        for statement in reversed([*_inlined(statements)]):
            later, bound, filled = {*self._bound}, source.names_in(statement, ast.Store), filled_by(statement)
            # A value that is only read holds its changes already. One of its attributes may have a graph.
            read = {name for name, x in self.reads.items() if not isinstance(x, Tensor)}
            wanted = (bound | filled) & needed | filled_by(statement, plainly=True) & read
            changed = bound | wanted
            # The statements of a block bind one after the other, those of a loop in any order.
            self._bound |= set() if isinstance(statement, _IN_ORDER) else changed
            if wanted or not self._ends.keys().isdisjoint(ast.walk(statement)):
                if (again := self._statement(statement, needed)) is None:
                    values = [] if self._calls_kept(statement) else [self._names.get(name) for name in wanted]
                    is_lost = bool(not wanted or wanted & later or wanted - self._names.keys())
                    is_lost |= any(map(_has_graph, values))
                    # Bad data stays as it was handed out. A branch that is not taken may have what is lost.
                    reason = f"line {statement.lineno} of {self._caller.code.co_filename} {_ONCE}"
                    stand_in = f"raise RuntimeError({reason!r})" if is_lost else "pass"
                    self._keep(set() if is_lost else wanted)
                    again = ast.parse(stand_in).body[0], needed - wanted
                made, needed = again
                body = [ast.copy_location(made, statement), *body]
            self._bound |= changed
        return body, needed

    def _statement(self, statement: ast.stmt, needed: set[str]) -> tuple[ast.stmt, set[str]] | None:
        """Return the statement as it runs again, and the names that have to be made before it.

        None where a second run would take data, or change more than the names.
        """
        made: Any = self._ends.get(statement, copy.copy(statement))
        header = getattr(statement, _HEADERS.get(type(statement), ""), made)
        header = header if isinstance(header, list) else [header]
        nodes = [x for top in header for x in ast.walk(top)]
        # A DataLoader would hand out other data, and an iterator would be further on than before.
        values = map(self._caller.value_of, nodes) if isinstance(statement, ast.For) else ()
        is_once = any(isinstance(x, Iterator | DataLoader) for x in values) or any(map(self._is_once, nodes))
        is_known = isinstance(statement, _PLAIN | _IN_ORDER | _LOOPS) or statement in self._ends
        if is_once or not is_known or self._calls_kept(statement):
            return None
        if isinstance(statement, _IN_ORDER | _LOOPS):
            first = needed
            if isinstance(statement, _LOOPS):
                self._ends |= {x: x for x in ast.walk(statement) if isinstance(x, ast.Break | ast.Continue)}
                # A second time, as an iteration reads what an earlier one has made.
                first = needed.union(*map(self._needed, header))
                first |= self._block(statement.body, first)[1]
            made.body, first = self._block(statement.body, first)
            made.body = made.body or [ast.Pass()]
            if isinstance(statement, ast.If):
                made.orelse, second = self._block(statement.orelse, needed)
                first |= second
            needed = first
        if isinstance(statement, ast.For):
            needed = needed - source.names_in(statement.target, ast.Store)
        elif isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr):
            needed = needed - source.names_in(statement, ast.Store)
        return made, needed.union(*map(self._needed, header))

    def _calls_kept(self, statement: ast.stmt) -> bool:
        """Return whether the statement assigns what a call of the kept model, or of a part of it, returned."""
        modules = [] if self.kept is None or not isinstance(statement, ast.Assign) else self.kept.modules()
        callees = [self._caller.value_of(x.func) for x in ast.walk(statement) if isinstance(x, ast.Call)]
        return any(module is callee for module in modules for callee in callees[:1])  # the outermost

    def _is_once(self, node: ast.AST) -> bool:
        """Return whether a second run of the node would do more than make a value."""
        name, owner = source.called_name(node), getattr(getattr(node, "func", None), "value", None)
        if name == "step" and owner is not None and isolation.is_child():
            function = getattr(self._caller.value_of(owner), "step", None)
            library = str(getattr(function, "__module__", "torch")).partition(".")[0]
            return library == "torch"  # the program's own may return a loss
        return name in _NOT_TWICE or isinstance(node, ast.Await | ast.Yield | ast.YieldFrom)


def _ending(name: str, value: ast.expr) -> ast.stmt:
    call = ast.Call(ast.Name(name, ast.Load()), [value], [])
    return ast.Raise(call) if name == RETURN else ast.Expr(call)


def _inlined(statements: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements, those of a `try` in its place: its body raised nothing."""
    for x in statements:
        yield from _inlined([*x.body, *x.orelse]) if isinstance(x, ast.Try) else [x]


def _has_graph(value: Any) -> bool:
    return any(x.grad_fn is not None for x in tensors_of(value))


def filled_by(top: ast.AST, *, plainly: bool = False) -> set[str]:
    """Return the names whose values are changed in place: `p.clamp_()`, `s.den = x`, `losses["a"] += x`, `total += x`.

    `plainly`: those alone that an assignment without an operator changes, which may run several times.
    """
    filled, nodes = set[str](), [*ast.walk(top)]
    steps = [x.target for x in nodes if isinstance(x, ast.AugAssign)]
    for node in nodes:
        name, changed = source.called_name(node), getattr(node, "func", None)
        is_change = name in _CHANGES or (name.endswith("_") and not name.endswith("__"))
        if isinstance(getattr(node, "ctx", None), ast.Store):
            is_change, changed = not (plainly and node in steps), node
        owner = changed if is_change and not (plainly and changed is not node) else None
        while isinstance(owner, ast.Attribute | ast.Subscript):
            owner = owner.value
        if isinstance(owner, ast.Name) and (owner is not changed or node in steps):
            filled.add(owner.id)
    return filled
