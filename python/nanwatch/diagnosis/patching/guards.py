"""Guards: changes that keep the operands of an operation inside its domain."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from inspect import signature
from typing import NamedTuple

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


Guard = Callable[[Site, Spelt, Facts], Iterator[Rewrite]]

# Large enough for the inverse, and the inverse of the square, to stay in the format; small against healthy values.
_SMALL = {"float64": "1e-12", "float32": "1e-8", "bfloat16": "1e-8", "float16": "1e-4"}
_TINY = {"float64": "1e-24", "float32": "1e-12", "bfloat16": "1e-12", "float16": "1e-4"}
# The distance from 1 at which a derivative with a pole there is of moderate size.
_NEAR_ONE = {"float64": "1e-9", "float32": "1e-6", "bfloat16": "1e-2", "float16": "1e-3"}
# exp of the first leaves room for what follows; that of the second is near the end of the format.
_EXPONENTS = {"float64": (40, 700), "float32": (20, 80), "bfloat16": (20, 80), "float16": (5, 10)}
_LOWEST = {"float16": "-6e4"}
_MOST_EPS = 1e-2
_EPSILONS = frozenset({"eps", "epsilon"})
_LONG = 40  # characters of an operand that may be written twice


def small(facts: Facts) -> str:
    """Return a number that may be added to a divisor."""
    return _SMALL.get(facts.dtype, "1e-8")


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


def at_least(site: Site, node: ast.expr, least: str) -> Iterator[tuple[ast.expr, str]]:
    """Yield what to replace and by what, so that the node is at least so large."""
    if (epsilon := _epsilon(site, node)) is not None:
        yield epsilon, least
    yield node, clamped(site, node, least=least)


def divisors(spelt: Spelt) -> list[tuple[int, ast.expr]]:
    """Return the divisor of a division, with its position among the operands."""
    if spelt.name == "div" and len(spelt.args) > 1:
        return [(1, spelt.args[1])]
    if spelt.name == "reciprocal":
        return [(0, spelt.args[0])]
    return []


def guard_division(site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
    """Keep the divisor away from zero."""
    words = "keep the divisor away from 0"
    for position, divisor in divisors(spelt):
        if site.constant(divisor) is not None:
            continue
        number = dict(facts.numbers).get(position)
        if number is not None:
            for least in ("1",) if isinstance(number, int) else (small(facts), "1"):
                yield Rewrite(divisor, f"max({site.text(divisor)}, {least})", f"divide by at least {least}")
            continue
        counted = {position, 0} if facts.operation == "reciprocal" else {position}
        if facts.counts & counted and is_count(site, divisor):
            yield Rewrite(divisor, clamped(site, divisor, least="1"), "divide by at least 1")
        has_epsilon = _epsilon(site, divisor) is not None
        if (
            not (has_epsilon or is_nonnegative(site, divisor))
            and len(site.text(divisor)) <= _LONG
            and site.torch
        ):
            text, eps = site.text(divisor), small(facts)
            yield Rewrite(
                divisor, f"{site.torch}.where({site.primary(divisor)}.abs() < {eps}, {eps}, {text})", words
            )
        for node, text in at_least(site, divisor, small(facts)):
            yield Rewrite(node, text, words)
        if len(site.text(divisor)) <= _LONG:
            mask = f"{site.operand(divisor)} == 0"
            text = f"{site.primary(divisor)}.masked_fill({mask}, 1)"
            yield Rewrite(divisor, text, "divide by 1 where the divisor is 0")
        larger = "1e-3" if facts.dtype == "float16" else "1e-6"
        for node, text in at_least(site, divisor, larger):
            yield Rewrite(node, text, words)


def guard_root(site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
    """Keep what a root or a power is taken of positive, as its gradient at 0 is infinite."""
    node = spelt.args[0]
    if isinstance(spelt.node, ast.BinOp) and isinstance(site.constant(node), int | float):
        return
    is_power = spelt.name == "pow" and len(spelt.args) > 1
    exponent = (site.constant(spelt.args[1]) or dict(facts.numbers).get(1)) if is_power else None
    if isinstance(exponent, int | float) and exponent >= 1 and exponent == int(exponent):
        return  # neither it nor its gradient has a pole
    if 0 in facts.counts and is_count(site, node):
        yield Rewrite(node, clamped(site, node, least="1"), "take the root of at least 1")
    elif facts.operation and not facts.backward:  # a root that makes the value itself
        yield Rewrite(
            node, clamped(site, node, least="0"), "keep what the root is taken of from being negative"
        )
    for least in dict.fromkeys((_TINY.get(facts.dtype, "1e-12"), small(facts), "1e-6")):
        for replaced, text in at_least(site, node, least):
            yield Rewrite(replaced, text, "keep what the root is taken of away from 0")
    yield Rewrite(node, f"({site.text(node)} + {small(facts)})", "keep what the root is taken of away from 0")


def guard_logarithm(site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
    """Keep what a logarithm is taken of positive."""
    node = spelt.args[0]
    words = "keep what the logarithm is taken of away from 0"
    for least in dict.fromkeys((_TINY.get(facts.dtype, "1e-12"), small(facts), "1e-6")):
        for replaced, text in at_least(site, node, least):
            yield Rewrite(replaced, text, words)


def guard_log1p(site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
    """Keep the operand of log1p above -1."""
    node = spelt.args[0]
    least = f"-1 + {_NEAR_ONE.get(facts.dtype, '1e-6')}"
    yield Rewrite(node, clamped(site, node, least=least), "keep what log1p is taken of above -1")


def guard_exponential(site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
    """Keep the exponent below the logarithm of the largest number."""
    node = spelt.args[0]
    for most in _EXPONENTS.get(facts.dtype, (20, 80)):
        yield Rewrite(node, clamped(site, node, most=str(most)), f"keep the exponent at {most} or less")


def guard_arc(site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
    """Keep the operand of acos, asin, atanh or erfinv inside (-1, 1), that of acosh above 1."""
    node = spelt.args[0]
    if spelt.name == "acosh":
        for gap in (_NEAR_ONE.get(facts.dtype, "1e-6"), "1e-4"):
            yield Rewrite(node, clamped(site, node, f"1 + {gap}"), "keep the operand of acosh above 1")
        return
    words = f"keep the operand of {spelt.name} inside -1 to 1"
    if not facts.backward and spelt.name in ("acos", "asin"):
        yield Rewrite(node, clamped(site, node, "-1", "1"), words)
    for gap in (_NEAR_ONE.get(facts.dtype, "1e-6"), "1e-4"):
        yield Rewrite(node, clamped(site, node, f"-1 + {gap}", f"1 - {gap}"), words)


def guard_angle(site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
    """Take the angle by atan2, whose gradient at 0 is finite."""
    z = site.primary(spelt.args[0])
    if site.torch:
        words = "take the angle by atan2, whose gradient at 0 is 0"
        yield Rewrite(spelt.node, f"{site.torch}.atan2({z}.imag, {z}.real)", words)


def guard_softmax(site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
    """Give a softmax finite scores, so that a row that is masked everywhere is uniform."""
    node = spelt.args[0]
    text = clamped(site, node, least=_LOWEST.get(facts.dtype, "-1e30"))
    yield Rewrite(node, text, "mask with a finite score, so that a row masked everywhere becomes uniform")


def guard_infinity(site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
    """Clamp an infinite operand of a sum or difference."""
    for node in () if facts.finite else reversed(spelt.args[:2]):
        if site.constant(node) is None:
            text = clamped(site, node, least=_LOWEST.get(facts.dtype, "-1e30"))
            yield Rewrite(node, text, "keep the operand from being -inf")


def guard_product(site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
    """Multiply by 0 where the other factor is 0: 0 times an infinity is nan, and no product of finite factors is."""
    if not site.torch or len(spelt.args) < 2 or (facts.finite and not facts.backward):
        return
    for factor, other in ((spelt.args[0], spelt.args[1]), (spelt.args[1], spelt.args[0])):
        if site.constant(other) is not None or site.constant(factor) is not None:
            continue
        text = f"{site.torch}.where({site.operand(other)} == 0, 0.0, {site.text(factor)})"
        replaced: ast.AST = factor
        if isinstance(spelt.node, ast.AugAssign) and factor is spelt.args[0]:
            continue
        yield Rewrite(replaced, text, f"take 0 in place of the factor where `{site.text(other)}` is 0")


def guard_spread(site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
    """Take the standard deviation or variance of the values themselves, which one value has too."""
    words = "do not divide by the number of values less one, which is 0 for one value"
    if "correction" in spelt.kwargs:
        yield Rewrite(spelt.kwargs["correction"], "0", words)
        return
    for rewrite in _with_option(site, spelt, "unbiased", "False", words):
        yield rewrite
        if rewrite.node is spelt.node:
            # The spread of one value is 0, and is often a divisor.
            text = f"{rewrite.text}.clamp(min={small(facts)})"
            yield Rewrite(spelt.node, text, f"{words}, and keep it away from 0")


def with_argument(call: str, argument: str) -> str:
    """Return the text of a call with one more argument."""
    body = call[:-1].rstrip().removesuffix(",")
    return f"{body}{'' if body.endswith('(') else ', '}{argument})"


def guard_epsilon(site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
    """Give F.normalize, torch.logit and their like an eps that the format has."""
    eps = _NEAR_ONE.get(facts.dtype, "1e-6") if spelt.name == "logit" else small(facts)
    yield from _with_option(site, spelt, "eps", eps, "give it an eps that the format has")


def guard_alignment(site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
    """Let a CTC loss leave out samples that are shorter than their labels."""
    words = "leave out samples that are shorter than their labels, whose loss is infinite"
    yield from _with_option(site, spelt, "zero_infinity", "True", words)


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


def guard_rate(site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
    """Keep the rate of a Poisson loss positive, or its logarithm from overflowing."""
    is_plain = "log_input" in spelt.kwargs and site.constant(spelt.kwargs["log_input"]) == 0
    if is_plain:
        text = clamped(site, spelt.args[0], least=small(facts))
        yield Rewrite(spelt.args[0], text, "keep the rate from being negative")
    else:
        yield from guard_exponential(site, spelt, facts)


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


def guard_decomposition(site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
    """Move equal eigenvalues or singular values apart."""
    if not site.torch:
        return
    a = site.text(spelt.args[0])
    primary = site.primary(spelt.args[0])
    words = "move equal singular values or eigenvalues apart, whose gradient is infinite"
    for most in ("1e-4", "1e-3", "1e-2"):
        shift = f"{site.torch}.linspace(0, {most}, {primary}.shape[-1], device={primary}.device)"
        yield Rewrite(
            spelt.args[0],
            f"{a} + {site.torch}.eye(*{primary}.shape[-2:], device={primary}.device) * {shift}",
            words,
        )
