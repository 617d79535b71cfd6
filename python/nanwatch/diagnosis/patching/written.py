"""Expressions of a site written out, to be evaluated beside the line itself: as it is, and under each change."""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Mapping
from types import BuiltinFunctionType, BuiltinMethodType, FunctionType, MappingProxyType, ModuleType
from typing import Any

from torch import Tensor

from .site import Change, Site
from .source import SourceFile, all_names, called_name, is_self, names_in

# Local names are replaced by their definitions so often.
_DEPTH = 4
# What is not done a second time: it would draw random numbers, or take as long as the forward.
_RANDOM = frozenset({"bernoulli", "multinomial", "normal", "poisson", "rrelu", "gumbel_softmax"})
_LONG = ("matmul", "mm", "bmm", "einsum", "linear", "conv", "scaled_dot_product_attention")
_BUILTINS = frozenset(dir(builtins))
DECOMPOSITIONS = ("svd", "eigh")
_METHODS = frozenset(name for name in dir(Tensor) if not (name.endswith("_") and not name.endswith("__")))


def is_pure(site: Site, node: ast.AST) -> bool:
    """Return whether an expression has no effect, as far as its text tells: operations of torch on values."""
    return all(_is_pure(site, one) for one in ast.walk(node))


def _is_pure(site: Site, node: ast.AST) -> bool:
    if isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom | ast.Starred):
        return False
    if not isinstance(node, ast.Call):
        return True
    function = node.func
    if isinstance(function, ast.Name):
        value = site.target.names.get(function.id, getattr(builtins, function.id, None))
        return _is_of_torch(value) or value in (abs, max, min, sum, len, float, int, tuple)
    if not isinstance(function, ast.Attribute):
        return False
    name = function.attr
    if "rand" in name or "dropout" in name or name in _RANDOM:
        return False
    owner = site.constant(function.value)
    if isinstance(owner, ModuleType):
        return owner.__name__.partition(".")[0] in ("torch", "math")
    return name in _METHODS and not is_self(function.value)


def _is_of_torch(value: Any) -> bool:
    is_function = isinstance(value, FunctionType | BuiltinFunctionType | BuiltinMethodType)
    return is_function and (getattr(value, "__module__", None) or "torch").partition(".")[0] == "torch"


def judged(site: Site, failing: ast.AST | None) -> ast.expr | None:
    """Return the expression whose value tells of a change: the largest without effects around the failing one."""
    value = site.value
    if value is not None and any(called_name(one) in DECOMPOSITIONS for one in ast.walk(value)):
        return None  # singular vectors are any of many
    if value is None or is_pure(site, value):
        return value
    around = [failing, *(site.ancestors(failing) if failing is not None else ())]
    pure = [one for one in around if isinstance(one, ast.expr) and is_pure(site, one)]
    return pure[-1] if pure else None


def written_out(site: Site, node: ast.expr, given: Mapping[str, ast.expr] = MappingProxyType({})) -> ast.expr:
    """Return the expression with local names replaced by their definitions, so that it begins from what came before.

    `given` are other definitions for some. A tuple: the value, and what it was made from.
    """
    value = _Names(site, given, _DEPTH).visit(copy.deepcopy(node))
    names = names_in(value, ast.Load) - site.target.names.keys() - _BUILTINS
    operands: list[ast.expr] = [ast.Name(name, ast.Load()) for name in sorted(names)]
    operands += [
        copy.deepcopy(x) for x in ast.walk(value) if isinstance(x, ast.Attribute) and is_self(x.value)
    ]
    return ast.Tuple([value, ast.Tuple(operands, ast.Load())], ast.Load())


def changed(site: Site, node: ast.expr, change: Change, after: SourceFile) -> ast.expr | None:
    """Return `written_out` under a change in it, or in the definition of a name in it; None where it is elsewhere."""
    span = site.file.span(node)
    if all(span.covers(one.span) for one in change.edits):
        new = _parsed(after.part(site.file.moved(span, change.edits)))
        return None if new is None else written_out(site, new)
    for name in all_names(node):
        value = site.definition(ast.Name(name))
        place = None if value is None else site.file.bracketed(site.file.span(value))
        if value is None or place is None or not all(place.covers(one.span) for one in change.edits):
            continue
        new = _parsed(after.part(site.file.moved(place, change.edits)))
        if new is not None and site.written_out(ast.Name(name)) is value and is_pure(site, value):
            return written_out(site, node, {name: new})
    return None


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(f"({text}\n)", mode="eval").body
    except SyntaxError:
        return None


class _Names(ast.NodeTransformer):
    """Puts definitions in the place of names."""

    def __init__(self, site: Site, given: Mapping[str, ast.expr], depth: int) -> None:
        self._site = site
        self._given = given
        self._depth = depth

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self._given:
            return _Names(self._site, {}, self._depth - 1).visit(copy.deepcopy(self._given[node.id]))  # type: ignore[no-any-return]
        value = self._site.written_out(node) if self._depth else node
        is_long = any(
            isinstance(one, ast.MatMult) or called_name(one).startswith(_LONG) for one in ast.walk(value)
        )
        if value is node or is_long or not is_pure(self._site, value):
            return node
        return _Names(self._site, self._given, self._depth - 1).visit(copy.deepcopy(value))  # type: ignore[no-any-return]
