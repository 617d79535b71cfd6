"""The text of a form: its letters replaced by what they stand for in the source, with the brackets that it needs."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable

from .site import Site
from .terms import Operand, Reader, Term
from .written import is_pure

# How tightly a text binds: a sum, a product, a sign, a power, a name or a call.
_SUM, _PRODUCT, _SIGN, _POWER, ATOM = range(1, 6)
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.MatMult: "@", ast.Pow: "**"}
_CONSTANTS = {math.pi: "pi", math.sqrt(2): "sqrt(2)", math.log(2): "log(2)"}

_MASK = re.compile(r"(^|_)(mask|masks|eye|valid|eq|ne|gt|lt|ge|le|tril|triu)($|_)")

Text = tuple[str, int]


class NoForm(Exception):  # noqa: N818
    """The form cannot be written.

    A logarithm has no simpler one, a module has no name in the file, or a call with effects would run twice.
    """


def _level(node: ast.AST) -> int:
    if isinstance(node, ast.BinOp):
        is_sum, is_power = isinstance(node.op, ast.Add | ast.Sub), isinstance(node.op, ast.Pow)
        return _SUM if is_sum else _POWER if is_power else _PRODUCT
    if isinstance(node, ast.UnaryOp):
        return _SIGN
    is_atom = isinstance(node, ast.Name | ast.Attribute | ast.Call | ast.Subscript | ast.Constant)
    return ATOM if is_atom else 0


class Writer:
    """Writes a form. `log` returns the text of a logarithm, how tightly it binds, and whether it is without an exp."""

    def __init__(
        self,
        site: Site,
        reader: Reader,
        letters: dict[str, Operand],
        log: Callable[[Operand], tuple[str, int, bool]],
    ) -> None:
        self._site = site
        self._reader = reader
        self._letters = letters
        self._log = log

    def write(self, form: ast.expr) -> Text:
        """Return the text of a form and how tightly it binds."""
        if isinstance(form, ast.BinOp):
            return self._binary(form)
        if isinstance(form, ast.UnaryOp):
            return self._negative(form.operand)
        if isinstance(form, ast.Constant):
            assert isinstance(form.value, int | float)
            return self._number(form.value), ATOM
        if isinstance(form, ast.Name):
            return self._name(form.id)
        if isinstance(form, ast.Attribute):
            return f"{self._tight(form.value)}.{form.attr}", ATOM
        if isinstance(form, ast.Subscript):
            return f"{self._tight(form.value)}[{self.write(form.slice)[0]}]", ATOM
        assert isinstance(form, ast.Call)
        if isinstance(form.func, ast.Name):
            return self._call(form.func.id, form.args[0])
        arguments = [self.write(one)[0] for one in form.args]
        for one in form.keywords:
            assert isinstance(one.value, ast.expr)
            if one.arg is None and isinstance(one.value, ast.Name):
                arguments += self._others(one.value.id)
            else:
                value = (
                    self._option(one.value.value)
                    if isinstance(one.value, ast.Constant)
                    else self.write(one.value)[0]
                )
                arguments.append(f"{one.arg}={value}")
        return f"{self.write(form.func)[0]}({', '.join(arguments)})", ATOM

    def _tight(self, form: ast.expr) -> str:
        text, level = self.write(form)
        return text if level == ATOM else f"({text})"

    def _binary(self, form: ast.BinOp) -> Text:
        level = _level(form)
        (left, a), (right, b) = self.write(form.left), self.write(form.right)
        is_power = level == _POWER
        left = left if a > level - (not is_power) else f"({left})"
        sign = _SIGNS[type(form.op)]
        if sign in "+-" and right.startswith("-") and b >= _PRODUCT:
            sign, right = "-" if sign == "+" else "+", right[1:]
        right = right if b > level else f"({right})"
        return (f"{left}**{right}" if is_power else f"{left} {sign} {right}"), level

    def _negative(self, form: ast.expr) -> Text:
        """Return the negative of a form, without a sign where there are two."""
        operand = self._letters.get(form.id) if isinstance(form, ast.Name) else None
        if isinstance(operand, ast.UnaryOp) and isinstance(operand.op, ast.USub):
            return self._site.text(operand.operand), _level(operand.operand)
        text, level = self.write(form)
        if text.startswith("-") and level in (_PRODUCT, _SIGN):
            return text[1:], _PRODUCT
        return f"-{text}" if level >= _SIGN else f"-({text})", _SIGN

    def _name(self, name: str) -> Text:
        if name in ("torch", "F", "math"):
            return self._module(name), ATOM
        if name == "LN2":
            return self._number(math.log(2)), ATOM
        operand = self._letters.get(name)
        if isinstance(operand, float):
            return self._number(operand), ATOM if operand >= 0 else _SIGN
        if not isinstance(operand, ast.expr):
            raise NoForm
        is_elsewhere = not self._site.covers(operand)
        if is_elsewhere and not is_pure(self._site, operand):  # its statement stays, and would run it too
            raise NoForm
        return self._site.text(operand), _level(operand)

    def _module(self, name: str) -> str:
        found = {"torch": self._site.torch, "F": self._site.functional, "math": self._site.module(math, "")}[
            name
        ]
        if not found:
            raise NoForm
        return found

    def _number(self, value: float) -> str:
        """Return a number as people write it."""
        known = next((text for one, text in _CONSTANTS.items() if math.isclose(value, one, rel_tol=1e-9)), "")
        module = self._site.module(math, "")
        if known and module:
            return f"{module}.{known}"
        if 0 < value < 1e-3:
            return f"{value:g}".replace("e-0", "e-")
        return f"{value:g}" if value == int(value) and value >= 8 else repr(value)

    def _option(self, value: object) -> str:
        if isinstance(value, str):
            return f'"{value}"'
        return self._number(value) if type(value) is float else repr(value)

    def _call(self, name: str, argument: ast.expr) -> Text:
        """Return what LOG, MUST and T stand for."""
        if name == "T":
            turned = self._letters["T"]
            assert isinstance(turned, Term)
            return f"{self._tight(argument)}{turned.given}", ATOM
        assert isinstance(argument, ast.Name)
        operand = self._letters[argument.id]
        value = self._reader.number(operand)
        if value is not None and name == "LOG":
            if value <= 0:
                raise NoForm
            text = self._name(argument.id)[0]
            module = self._site.module(math, "")
            return f"{module}.log({text})" if module else repr(math.log(value)), ATOM
        try:
            text, level, is_simple = self._log(operand)
        except NoForm:
            if name == "MUST" or self._is_mask(operand):
                raise
            return f"{self._module('torch')}.log({self._name(argument.id)[0]})", ATOM
        if name == "MUST" and not is_simple:
            raise NoForm
        return text, level

    def _is_mask(self, operand: Operand) -> bool:
        """Return whether this picks elements by 0 and 1: its logarithm is no form of it."""
        value = self._site.written_out(operand) if isinstance(operand, ast.expr) else None
        whole = () if value is None else ast.walk(value)
        names = {getattr(one, "id", getattr(one, "attr", "")) for one in whole}
        return any(_MASK.search(name) for name in names) or isinstance(value, ast.Compare)

    def _others(self, letter: str) -> list[str]:
        """Return the other arguments of a reduction: as they were given, or by name where that is asked or safer."""
        others = self._letters[letter]
        assert isinstance(others, Term)
        options = sorted(others.options.items(), key=lambda one: one[0] != "dim")
        by_name = [f"{name}={self._site.text(x)}" for name, x in options]
        given = ast.parse(f"f({others.given})", mode="eval").body
        assert isinstance(given, ast.Call)
        is_whole = len(given.args) + len(given.keywords) == len(by_name) and len(given.args) <= 1
        return [others.given] if is_whole and letter == "r" and by_name else by_name
