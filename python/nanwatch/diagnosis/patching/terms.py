"""Operations of the source in one spelling, so that a pattern of `forms` meets them however they are written."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

from .site import Site
from .source import is_self

# Arguments of reductions that may be given by position, by the name of the reduction.
SIGNATURES = {
    **dict.fromkeys(("sum", "mean", "amax", "amin", "logsumexp"), ("dim", "keepdim")),
    **dict.fromkeys(("prod", "softmax", "log_softmax", "cumsum", "cumprod", "size"), ("dim",)),
    "norm": ("p", "dim", "keepdim"),
}
_SAME_OPTION = {"axis": "dim", "keepdims": "keepdim", "ord": "p"}


class Term(NamedTuple):
    """An operation in its one spelling. The operands are nodes, numbers, or operations that a spelling hides."""

    name: str
    args: tuple[Operand, ...]
    options: dict[str, ast.expr] = {}  # noqa: RUF012 - never written to
    # The arguments but the first, as they were given.
    given: str = ""
    node: ast.AST | None = None


Operand = ast.expr | float | Term


class Reader:
    """Reads the operations of a site."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def term(self, operand: Operand) -> Term | None:
        """Return the operation in its one spelling, None for what is none."""
        if isinstance(operand, float):
            return None
        if isinstance(operand, Term):
            return operand
        if self.number(operand) is not None:
            return None
        if isinstance(operand, ast.UnaryOp) and isinstance(operand.op, ast.USub):
            return Term("neg", (operand.operand,), node=operand)
        if isinstance(operand, ast.Attribute) and operand.attr in ("T", "mT"):
            return Term("T", (operand.value,), given=f".{operand.attr}", node=operand)
        if isinstance(operand, ast.Subscript):
            return self._subscript(operand)
        spelt = self.site.spelt(operand)
        if spelt is None:
            return None
        is_own = isinstance(operand, ast.Call) and is_self(getattr(operand.func, "value", operand))
        if is_own and spelt.name not in ("sigmoid", "tanh"):
            return None
        others = [self.site.text(x) for x in spelt.args[1:]]
        others += [f"{name}={self.site.text(x)}" for name, x in spelt.kwargs.items()]
        term = Term(spelt.name, spelt.args, dict(spelt.kwargs), ", ".join(others), operand)
        return self._one_spelling(self._with_options(term))

    def _subscript(self, node: ast.Subscript) -> Term | None:
        value, index = node.value, ast.unparse(node.slice).strip("()")
        if isinstance(value, ast.Attribute) and value.attr == "shape":
            return Term("size", (value.value,), {"dim": node.slice}, node=node)
        if index in (":, None", "..., None"):
            return Term("column", (value,), node=node)
        return Term("row", (value,), node=node) if index in ("None, :", "None") else None

    @staticmethod
    def _with_options(term: Term) -> Term:
        names = SIGNATURES.get(term.name)
        if names is None:
            return term
        options = {_SAME_OPTION.get(name, name): x for name, x in term.options.items()}
        for name, x in zip(names, term.args[1:], strict=False):
            if isinstance(x, ast.expr):
                options[name] = x
        return term._replace(args=term.args[:1], options=options)

    def _one_spelling(self, term: Term) -> Term:
        name, args = term.name, term.args
        numbers = [self.number(x) for x in args]
        node = term.node
        if name in ("negative", "neg"):
            return Term("neg", args, node=node)
        if name in ("mm", "bmm"):
            return term._replace(name="matmul")
        if name == "absolute":
            return term._replace(name="abs")
        if name == "square":
            return Term("pow", (args[0], 2.0), node=node)
        if name == "rsqrt":
            return Term("div", (1.0, Term("sqrt", args, node=node)), node=node)
        if name == "reciprocal":
            return Term("div", (1.0, args[0]), node=node)
        if name == "log1p":
            return Term("log", (Term("add", (1.0, args[0]), node=node),), node=node)
        if name == "expm1":
            return Term("sub", (Term("exp", args, node=node), 1.0), node=node)
        if name == "pow" and len(args) == 2 and numbers[1] in (0.5, -0.5, -1.0):
            root = args[0] if numbers[1] == -1 else Term("sqrt", args[:1], node=node)
            return (
                Term("div", (1.0, root), node=node)
                if numbers[1] != 0.5
                else Term("sqrt", args[:1], node=node)
            )
        if name == "norm":
            p = term.options.pop("p", None)
            is_two = (
                p is None or self.number(p) == 2 or (isinstance(p, ast.Constant) and p.value in ("fro", None))
            )
            return term if is_two else term._replace(name="norm_of_other_order")
        if name in ("t", "transpose", "permute") and isinstance(node, ast.Call):
            ends = sorted(x for x in numbers[1:] if x is not None)
            if name == "t" or ends in ([-2, -1], [0, 1]):
                base = args[0]
                text, inner = self.site.text(node), self.site.text(base) if isinstance(base, ast.expr) else ""
                suffix = text.removeprefix(inner) if text.startswith(inner) else ".mT"
                return Term("T", args[:1], given=suffix, node=node)
        if name == "unsqueeze" and numbers[1:] in ([0], [1], [-1]):
            return Term("row" if numbers[1] == 0 else "column", args[:1], node=node)
        if len(args) == 2:
            return self._binary(term, numbers)
        return term

    def _binary(self, term: Term, numbers: list[float | None]) -> Term:
        (a, b), node = term.args, term.node
        x, y = numbers
        first, second = self.term(a), self.term(b)
        negated = [one.args[0] if one is not None and one.name == "neg" else None for one in (first, second)]
        if term.name == "mul":
            if y is not None:
                a, b, x = b, a, y
            if x == -1:
                return Term("neg", (b,), node=node)
            if self.same(a, b):
                return Term("pow", (a, 2.0), node=node)
            if x == 0.5 and self._is_phi(b):
                return self._phi(b, node)
            return Term("mul", (a, b), node=node)
        if term.name == "div" and y is not None and y != 0 and x is None:
            return self._binary(Term("mul", (1 / y, a), node=node), [1 / y, None])
        if term.name == "add" and y is not None and y < 0:
            return Term("sub", (a, -y), node=node)
        if term.name == "add" and x is not None and x < 0:
            return Term("sub", (b, -x), node=node)
        if term.name == "add" and negated[0] is not None:
            return Term("sub", (b, negated[0]), node=node)
        if negated[1] is not None and term.name in ("add", "sub"):
            return Term("sub" if term.name == "add" else "add", (a, negated[1]), node=node)
        if term.name == "sub" and x == 0:
            return Term("neg", (b,), node=node)
        return term

    def _is_phi(self, operand: Operand) -> bool:
        """Return whether this is 1 + erf(x / sqrt(2))."""
        total = self.term(operand)
        if total is None or total.name != "add":
            return False
        return any(
            self.number(one) == 1 and (erf := self.term(other)) is not None and erf.name == "erf"
            for one, other in (total.args[:2], total.args[1::-1])
        )

    def _phi(self, operand: Operand, node: ast.AST | None) -> Term:
        """Return the distribution function of the normal distribution, of what it is taken of."""
        total = self.term(operand)
        assert total is not None
        erf = next(one for x in total.args if (one := self.term(x)) is not None and one.name == "erf")
        scaled = self.term(erf.args[0])
        factor = None if scaled is None or scaled.name != "mul" else self.number(scaled.args[0])
        if scaled is not None and factor is not None and math.isclose(factor, math.sqrt(0.5), rel_tol=1e-4):
            return Term("ndtr", scaled.args[1:], node=node)
        return Term("mul", (0.5, operand), node=node)

    def number(self, operand: Operand) -> float | None:
        """Return the number that an operand is, by constants and the functions of `math`."""
        if isinstance(operand, float):
            return operand
        if isinstance(operand, Term):
            return None
        value = self.site.constant(operand)
        if isinstance(value, int | float):
            return float(value)
        if isinstance(operand, ast.BinOp):
            a, b = self.number(operand.left), self.number(operand.right)
            made = _ARITHMETIC.get(type(operand.op))
            with suppress(ArithmeticError, ValueError, TypeError):
                return None if made is None or a is None or b is None else float(made(a, b))
            return None
        if (
            isinstance(operand, ast.Call)
            and isinstance(operand.func, ast.Attribute)
            and len(operand.args) == 1
        ):
            given = self.number(operand.args[0])
            is_math = self.site.constant(operand.func.value) is math
            if given is not None and is_math and operand.func.attr in ("sqrt", "log", "exp"):
                return float(getattr(math, operand.func.attr)(given)) if given > 0 else None
        return None

    def same(self, one: Operand, other: Operand) -> bool:
        """Return whether two operands are written the same, names written out where that helps."""
        a, b = self.number(one), self.number(other)
        if a is not None or b is not None:
            return a is not None and b is not None and math.isclose(a, b, rel_tol=1e-6)
        if isinstance(one, ast.expr) and isinstance(other, ast.expr):
            if ast.dump(one) == ast.dump(other):
                return True
            wide, narrow = self.site.written_out(one), self.site.written_out(other)
            return (wide is not one or narrow is not other) and ast.dump(wide) == ast.dump(narrow)
        return isinstance(one, Term) and isinstance(other, Term) and one == other


_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: operator.pow,
}
