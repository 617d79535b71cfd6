"""Guards: changes that keep the operands of an operation inside its domain, as a table of rows."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from inspect import signature
from typing import Any, NamedTuple

from .meanings import bounds_of, is_count, is_nonnegative, name_of, words
from .site import Rewrite, Site, Spelt


class Facts(NamedTuple):
    """The failing operation: its name in torch.ops.aten, its narrowest float format, and whether its gradient fails.

    `counts`: the operands, by position, that hold whole numbers from 0 on only, not all of them zero. `numbers`: those
    that are Python numbers, with their values. `finite`: no operand holds nan or inf.
    """

    operation: str
    dtype: str
    backward: bool
    counts: frozenset[int] = frozenset()
    numbers: tuple[tuple[int, float], ...] = ()
    finite: bool = False


# Names of operations in the source [the position of the operand or `call`, and conditions of all rows] the words.
# Then a row for each change, in the order of the trials: `conditions: change -- words of its own`. A change is
# `>= LEAST`, for which an epsilon that is added already may grow, or `in LEAST .. MOST`, or an option of the call, or
# another text for what is replaced, which is `x` there; `y` is the other operand. Conditions are names of _CONDITIONS
# (`!` is not), numbers those of _NUMBERS. `<a|b>` stands for one row with each.
_TABLE = """
div reciprocal [-1 number] divide by at least 1
    int: max({x}, 1)
    !int: max({x}, {small}) -- divide by at least {small}
    !int: max({x}, 1)
div reciprocal [-1 !number] keep the divisor away from 0
    count: in 1 .. -- divide by at least 1
    sign short: torch.where({x.primary}.abs() < {small}, {small}, {x})
    >= {small}
    short: {x.primary}.masked_fill({x.operand} == 0, 1) -- divide by 1 where the divisor is 0
    >= {larger}
sqrt rsqrt pow [0 pole] keep what the root is taken of away from 0
    count: in 1 .. -- take the root of at least 1
    !count !backward known: in 0 .. -- keep what the root is taken of from being negative
    >= <{tiny}|{small}|1e-6>
    ({x} + {small})
log log2 log10 lgamma digamma [0] keep what the logarithm is taken of away from 0
    >= <{tiny}|{small}|1e-6>
log1p [0] keep what log1p is taken of above -1
    in -1 + {near} ..
poisson_nll_loss [0 rate] keep the rate from being negative
    in {small} ..
exp exp2 expm1 sinh cosh poisson_nll_loss [0 !rate] keep the exponent at {bound} or less
    in .. <{safe}|{most}>
acosh [0] keep the operand of acosh above 1
    in 1 + <{near}|1e-4> ..
acos asin [0 !backward] keep the operand of {name} inside -1 to 1
    in -1 .. 1
acos asin atanh erfinv [0] keep the operand of {name} inside -1 to 1
    in -1 + {near} .. 1 - {near}
    in -1 + 1e-4 .. 1 - 1e-4
softmax log_softmax logsumexp [0] mask with a finite score, so that a row masked everywhere becomes uniform
    in {lowest} ..
add sub [1 !finite] keep the operand from being -inf
    in {lowest} ..
add sub [0 !finite] keep the operand from being -inf
    in {lowest} ..
mul [0 factor] take 0 in place of the factor where `{y}` is 0
    torch.where({y.operand} == 0, 0.0, {x})
mul [1 factor] take 0 in place of the factor where `{y}` is 0
    torch.where({y.operand} == 0, 0.0, {x})
angle [call] take the angle by atan2, whose gradient at 0 is 0
    torch.atan2({y.primary}.imag, {y.primary}.real)
std var [call] do not divide by the number of values less one, which is 0 for one value
    correction: correction=0
    !correction: unbiased=False
logit [call] give it an eps that the format has
    eps={near}
normalize cosine_similarity layer_norm batch_norm group_norm instance_norm [call] give it an eps that the format has
    eps={small}
ctc_loss [call] leave out samples that are shorter than their labels, whose loss is infinite
    zero_infinity=True
svd eigh [0] move equal singular values or eigenvalues apart, whose gradient is infinite
    {x} + torch.eye(*{x.primary}.shape[-2:], device={x.primary}.device) * \
torch.linspace(0, <1e-4|1e-3|1e-2>, {x.primary}.shape[-1], device={x.primary}.device)
"""
# fmt: off
_NUMBERS = {name: dict(zip(("float64", "float32", "bfloat16", "float16"), numbers, strict=True)) for name, numbers in {
    # Large enough for the inverse, and the inverse of the square, to stay in the format; small against healthy values.
    "small": ("1e-12", "1e-8", "1e-8", "1e-4"),
    "larger": ("1e-6", "1e-6", "1e-6", "1e-3"),
    "tiny": ("1e-24", "1e-12", "1e-12", "1e-4"),
    # The distance from 1 at which a derivative with a pole there is of moderate size.
    "near": ("1e-9", "1e-6", "1e-2", "1e-3"),
    # The exponential of the first leaves room for what follows; that of the second is near the end of the format.
    "safe": ("40", "20", "20", "5"),
    "most": ("700", "80", "80", "10"),
    "lowest": ("-1e30", "-1e30", "-1e30", "-6e4"),
}.items()}
# fmt: on
_MOST_EPS = 1e-2
_EPSILONS = frozenset({"eps", "epsilon"})
_LONG = 40  # characters of an operand that may be written twice


class _Case(NamedTuple):
    """An operation of the source, and its operand that a row is for."""

    site: Site
    spelt: Spelt
    facts: Facts
    position: int
    x: ast.expr

    @property
    def number(self) -> float | None:
        """The value of an operand that is a Python number."""
        return dict(self.facts.numbers).get(self.position)

    @property
    def other(self) -> ast.expr:
        """The other one of two operands, or the only one of a call."""
        return self.spelt.args[len(self.spelt.args) > 1 and not self.position]

    def is_counted(self) -> bool:
        """Return whether the operand holds whole numbers, and the source says that they count something."""
        counted = {self.position, 0} if self.facts.operation == "reciprocal" else {self.position}
        return bool(self.facts.counts & counted) and is_count(self.site, self.x)

    def has_pole(self) -> bool:
        """Return whether the root or power, or its gradient, has a pole."""
        if self.spelt.name != "pow" or len(self.spelt.args) < 2:
            return True
        exponent = self.site.constant(self.spelt.args[1]) or dict(self.facts.numbers).get(1)
        return not (isinstance(exponent, int | float) and exponent >= 1 and exponent == int(exponent))

    def may_be_infinite(self) -> bool:
        """Return whether a factor may be infinite: 0 times that is nan, and no product of finite factors is."""
        is_variable = self.site.constant(self.other) is None
        return is_variable and (self.facts.backward or not self.facts.finite)


_CONDITIONS: dict[str, Callable[[_Case], Any]] = {
    "number": lambda case: case.number is not None,
    "int": lambda case: isinstance(case.number, int),
    "count": _Case.is_counted,
    "sign": lambda case: not _epsilon(case.site, case.x) and not is_nonnegative(case.site, case.x),
    "short": lambda case: len(case.site.text(case.x)) <= _LONG,
    "pole": _Case.has_pole,
    "backward": lambda case: case.facts.backward,
    "known": lambda case: case.facts.operation,
    "finite": lambda case: case.facts.finite,
    "factor": _Case.may_be_infinite,
    "rate": lambda case: case.site.constant(case.spelt.kwargs.get("log_input", case.x)) == 0,
    "correction": lambda case: "correction" in case.spelt.kwargs,
}


class _Text:
    """The text of a node in a row."""

    def __init__(self, site: Site, node: ast.expr) -> None:
        self.primary, self.operand, self._text = site.primary(node), site.operand(node), site.text(node)

    def __str__(self) -> str:
        return self._text


class _Row(NamedTuple):
    """A row of the table for one operation."""

    operand: str
    conditions: tuple[str, ...]
    change: str
    words: str

    def rewrites(self, site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
        """Yield the changes of this row, none where it is for another case."""
        is_call = self.operand == "call"
        position = 0 if is_call else int(self.operand) % len(spelt.args)
        x = spelt.node if is_call else (*spelt.args, None)[position]
        if not isinstance(x, ast.expr) or site.constant(x) is not None:
            return
        if isinstance(spelt.node, ast.AugAssign) and position == 0:
            return  # the result goes there
        case = _Case(site, spelt, facts, position, x)
        if any(bool(_CONDITIONS[one.strip("!")](case)) == one.startswith("!") for one in self.conditions):
            return
        texts: dict[str, Any] = {"x": _Text(site, x), "y": _Text(site, case.other), "name": spelt.name}
        texts |= {name: by_format[facts.dtype] for name, by_format in _NUMBERS.items()}
        change = self.change.format(**texts)
        kind, _, bounds = change.partition(" ")
        least, _, most = (one.strip() for one in bounds.partition(".."))
        reason = self.words.format(**texts, bound=least or most)
        if (option := re.fullmatch(r"(\w+)=(\S+)", change)) is not None:
            yield from _with_option(site, spelt, option[1], option[2], reason)
        elif kind in (">=", "in"):
            if kind == ">=" and (epsilon := _epsilon(site, x)) is not None:
                yield Rewrite(epsilon, least, reason)
            yield Rewrite(x, clamped(site, x, least, most), reason)
        elif site.torch or "torch." not in self.change:
            yield Rewrite(x, change.replace("torch.", f"{site.torch}."), reason)


@cache
def _rows() -> dict[str, list[_Row]]:
    """Return the rows of the table by the name of the operation."""
    found: dict[str, list[_Row]] = {}
    blocks = re.findall(r"^(\S.*?) \[(\S+) ?(.*?)\] (.*)\n((?: .*\n)+)", _TABLE, re.MULTILINE)
    for names, operand, general, reason, rows in blocks:
        for own, change, own_reason in re.findall(
            r"^ +(?:([a-z! ]+): )?(.*?)(?: -- (.*))?$", rows, re.MULTILINE
        ):
            conditions = (*general.split(), *own.split())
            choices = re.search(r"<([^<>]*[|][^<>]*)>", change)
            for choice in choices[1].split("|") if choices else [""]:
                text = change.replace(choices[0], choice) if choices else change
                for name in names.split():
                    found.setdefault(name, []).append(_Row(operand, conditions, text, own_reason or reason))
    return found


def guarded(site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
    """Yield the changes that keep the operands of an operation inside its domain."""
    rewrites = (one for row in _rows().get(spelt.name, ()) for one in row.rewrites(site, spelt, facts))
    yield from dict.fromkeys(rewrites)
    if spelt.name == "mean":
        yield from guard_mean(site, spelt, facts)


def has_guard(spelt: Spelt) -> bool:
    """Return whether there are guards for the operation."""
    return spelt.name == "mean" or spelt.name in _rows()


def clamped(site: Site, node: ast.expr, least: str = "", most: str = "") -> str:
    """Return the text of the node clamped; bounds that it has already are replaced where they are given here."""
    given: dict[str, str] = {}
    if (inner := bounds_of(site, node)) is not None:
        node = inner[0]
        given = {name: site.text(bound) for name, bound in inner[1].items()}
    given.update({name: value for name, value in (("min", least), ("max", most)) if value})
    bounds = ", ".join(f"{name}={given[name]}" for name in ("min", "max") if name in given)
    return f"{site.primary(node)}.clamp({bounds})"


def _epsilon(site: Site, node: ast.expr) -> ast.expr | None:
    """Return the small number that the node adds to something, None where it adds none."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)):
        return None
    for side in (node.right, node.left):
        value = site.constant(side)
        named = name_of(side)
        if (isinstance(value, float) and 0 < value <= _MOST_EPS) or not _EPSILONS.isdisjoint(words(named)):
            return side
    return None


def with_argument(call: str, argument: str) -> str:
    """Return the text of a call with one more argument."""
    body = call[:-1].rstrip().removesuffix(",")
    return f"{body}{'' if body.endswith('(') else ', '}{argument})"


def _with_option(site: Site, spelt: Spelt, name: str, value: str, words: str) -> Iterator[Rewrite]:
    """Give an argument of the called function another value, if the function is known to have it."""
    if name in spelt.kwargs:
        yield Rewrite(spelt.kwargs[name], value, words)
        return
    names = _parameters(site, spelt)
    if name not in names or not isinstance(spelt.node, ast.Call):
        return
    position = names.index(name)
    if position < len(spelt.args):
        yield Rewrite(spelt.args[position], value, words)
    else:
        yield Rewrite(spelt.node, with_argument(site.text(spelt.node), f"{name}={value}"), words)


# Of functions that have no signature in Python.
_PARAMETERS = {
    "logit": ("input", "eps"),
    "cosine_similarity": ("x1", "x2", "dim", "eps"),
    **dict.fromkeys(("std", "var"), ("input", "dim", "unbiased")),
}


def _parameters(site: Site, spelt: Spelt) -> tuple[str, ...]:
    """Return the names of the parameters of the function that is called, none where it is not known."""
    function = site.called(spelt.node)
    try:
        return () if function is None else tuple(signature(function).parameters)
    except (TypeError, ValueError):
        return _PARAMETERS.get(spelt.name, ())


def guard_mask(site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
    """Let a row that is masked everywhere see everything: softmax has nothing to choose from otherwise."""
    for name in ("key_padding_mask", "src_key_padding_mask", "attn_mask", "mask", "src_mask"):
        if (mask := spelt.kwargs.get(name)) is not None and len(site.text(mask)) <= _LONG:
            text = f"{site.operand(mask)} & ~{site.primary(mask)}.all(-1, keepdim=True)"
            yield Rewrite(mask, text, "mask no row everywhere")


def guard_mean(site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
    """Take the sum over at least one element in place of the mean of none."""
    call = spelt.node
    if not isinstance(call, ast.Call):
        return
    words = "take 0 for the mean of nothing"
    if spelt.name == "mean":
        if len(spelt.args) == 1 and not spelt.kwargs:
            x = site.primary(spelt.args[0])
            if len(x) <= 2 * _LONG:
                yield Rewrite(call, _bracketed(site, call, f"{x}.sum() / max({x}.numel(), 1)"), words)
        elif "dtype" not in spelt.kwargs:
            dim = spelt.kwargs.get("dim") or (spelt.args[1] if len(spelt.args) > 1 else None)
            x = site.primary(spelt.args[0])
            text = site.text(call).replace("mean(", "sum(", 1) if site.text(call).count("mean(") == 1 else ""
            if text and isinstance(dim, ast.Constant | ast.UnaryOp):
                text = f"{text} / max({x}.shape[{site.text(dim)}], 1)"
                yield Rewrite(call, _bracketed(site, call, text), words)
        return
    whole = site.text(call)
    for given in spelt.args[:3]:
        text = site.primary(given)
        if len(text) <= _LONG:
            yield Rewrite(call, f"({whole} if {text}.numel() else {text}.sum() * 0.0)", words)
    if facts.operation.startswith("nll_loss") and len(spelt.args) > 1:
        x, labels = site.primary(spelt.args[0]), site.operand(spelt.args[1])
        ignored = spelt.kwargs.get("ignore_index")
        indices = ["-100" if ignored is None else site.text(ignored)]
        if ignored is None and site.called(call) is None and site.may_have(call.func, "ignore_index"):
            indices.append(f"{site.text(call.func)}.ignore_index")
        for index in indices:
            text = f"({whole} if ({labels} != {index}).any() else {x}.sum() * 0.0)"
            yield Rewrite(call, text, "take 0 where all labels are ignored")


def _bracketed(site: Site, node: ast.AST, text: str) -> str:
    is_operand = isinstance(site.parent(node), ast.BinOp | ast.UnaryOp | ast.Attribute)
    return f"({text})" if is_operand else text
