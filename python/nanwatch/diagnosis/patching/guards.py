"""Guards: changes that keep the operands of an operation inside its domain."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .source import Rewrite, Site, Spelt


class Facts(NamedTuple):
    """The failing operation: its name in torch.ops.aten, its narrowest float format, and whether its gradient fails.

    `counts`: the operands, by position, that hold whole numbers only, not all of them zero. `numbers`: those that are
    Python numbers, with their values. `finite`: no operand holds nan or inf.
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
_LONG = 40  # characters of an operand that may be written twice


def small(facts: Facts) -> str:
    """Return a number that may be added to a divisor."""
    return _SMALL.get(facts.dtype, "1e-8")


def _bounds(site: Site, node: ast.expr) -> tuple[ast.expr, dict[str, ast.expr]] | None:
    """Return what the node clamps and its bounds; None where it clamps nothing."""
    spelt = site.spelt(node)
    if spelt is None or spelt.name not in ("clamp", "clamp_min", "clamp_max") or not spelt.args:
        return None
    names = {"clamp": ("min", "max"), "clamp_min": ("min",), "clamp_max": ("max",)}[spelt.name]
    bounds = dict(zip(names, spelt.args[1:], strict=False))
    return spelt.args[0], {**bounds, **{k: v for k, v in spelt.kwargs.items() if k in ("min", "max")}}


def clamped(site: Site, node: ast.expr, least: str = "", most: str = "") -> str:
    """Return the text of the node clamped; bounds that it has already are replaced where they are given here."""
    given: dict[str, str] = {}
    if (inner := _bounds(site, node)) is not None:
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
        named = (
            side.attr if isinstance(side, ast.Attribute) else side.id if isinstance(side, ast.Name) else ""
        )
        if (isinstance(value, float) and 0 < value <= _MOST_EPS) or "eps" in named.lower():
            return side
    return None


def at_least(site: Site, node: ast.expr, least: str) -> Iterator[tuple[ast.expr, str]]:
    """Yield what to replace and by what, so that the node is at least so large."""
    if (epsilon := _epsilon(site, node)) is not None:
        yield epsilon, least
    yield node, clamped(site, node, least=least)


def divisors(spelt: Spelt) -> list[tuple[int, ast.expr]]:
    """Return the divisor of a division, with its position among the operands."""
    if spelt.name in ("div", "fmod", "remainder", "floor_divide") and len(spelt.args) > 1:
        return [(1, spelt.args[1])]
    if spelt.name in ("reciprocal",):
        return [(0, spelt.args[0])]
    return []


# Operations whose results have no sign, and those that keep the sign of what they are given.
# fmt: off
_UNSIGNED = frozenset({
    "norm", "vector_norm", "std", "var", "square", "abs", "exp", "exp2", "softplus", "sigmoid", "softmax",
    "relu", "sqrt", "cosh", "eq", "ne", "gt", "lt", "ge", "le", "isfinite", "numel", "count_nonzero",
    "bincount", "len", "cdist", "pairwise_distance",
})
_SIGNED_AS_GIVEN = frozenset({
    "sum", "mean", "amax", "amin", "max", "min", "cumsum", "cumprod", "prod", "float", "double", "half",
    "squeeze", "unsqueeze", "view", "reshape", "flatten", "expand", "detach", "clone", "to", "clamp_max",
    "transpose", "permute", "gather", "index_select", "contiguous", "repeat",
})
# fmt: on
# In the name of a value whose definition is elsewhere.
_SIZES = ("mask", "count", "num", "std", "sigma", "var", "norm", "degree", "length")


def is_nonnegative(site: Site, node: ast.expr, depth: int = 4) -> bool:
    """Return whether the source says that the value is never negative: a norm, a sum of squares, a sum of a mask."""
    value = site.constant(node)
    if isinstance(value, int | float):
        return value >= 0
    node = site.definition(node) or node
    if isinstance(node, ast.Compare):
        return True
    if isinstance(node, ast.Subscript):
        return is_nonnegative(site, node.value, depth)
    spelt = site.spelt(node) if depth else None
    if spelt is None:
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        return any(word in name.lower() for word in _SIZES)
    if spelt.name in ("clamp", "clamp_min"):
        bounds = _bounds(site, node)
        least = None if bounds is None else bounds[1].get("min")
        return least is not None and is_nonnegative(site, least, depth - 1)
    if spelt.name == "pow":
        return len(spelt.args) > 1 and site.constant(spelt.args[1]) == 2
    if spelt.name == "mul" and ast.dump(spelt.args[0]) == ast.dump(spelt.args[1]):
        return True
    if spelt.name in ("add", "mul", "div", "where"):
        return all(is_nonnegative(site, one, depth - 1) for one in spelt.args[spelt.name == "where" :])
    is_kept = spelt.name in _SIGNED_AS_GIVEN and is_nonnegative(site, spelt.args[0], depth - 1)
    return spelt.name in _UNSIGNED or is_kept


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
        if facts.counts & counted:
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
    if 0 in facts.counts:
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
    """Take the angle by atan2, whose gradient at 0 is finite, of numbers that are not tiny."""
    z = site.primary(spelt.args[0])
    if site.torch:
        words = "take the angle by atan2, whose gradient at 0 is 0"
        yield Rewrite(spelt.node, f"{site.torch}.atan2({z}.imag, {z}.real)", words)
        real = f"{site.torch}.where({z}.abs() < 1e-10, 1e-10, {z}.real)"
        yield Rewrite(spelt.node, f"{site.torch}.atan2({z}.imag, {real})", "take the angle of no tiny number")


def guard_softmax(site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
    """Give a softmax finite scores, so that a row that is masked everywhere is uniform."""
    node = spelt.args[0]
    text = clamped(site, node, least=_LOWEST.get(facts.dtype, "-1e30"))
    yield Rewrite(node, text, "mask with a finite score, so that a row masked everywhere becomes uniform")


def guard_infinity(site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
    """Replace a literal infinity, or clamp an infinite operand of a sum or difference."""
    lowest = _LOWEST.get(facts.dtype, "-1e30")
    for node in () if facts.finite else reversed(spelt.args[:2]):
        if site.constant(node) is None:
            yield Rewrite(node, clamped(site, node, least=lowest), "keep the operand from being -inf")


def guard_product(site: Site, spelt: Spelt, facts: Facts) -> Iterator[Rewrite]:
    """Multiply by 0 where the other factor is 0: 0 times an infinity is nan."""
    if not site.torch or len(spelt.args) < 2:
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
    call = spelt.node
    if not isinstance(call, ast.Call):
        return
    words = "do not divide by the number of values less one, which is 0 for one value"
    for name, text in (("unbiased", "False"), ("correction", "0")):
        if name in spelt.kwargs:
            yield Rewrite(spelt.kwargs[name], text, words)
            return
    text = with_argument(site.text(call), "unbiased=False")
    yield Rewrite(call, text, words)
    # The spread of one value is 0, and is often a divisor.
    yield Rewrite(call, f"{text}.clamp(min={small(facts)})", f"{words}, and keep it away from 0")


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
    if name in spelt.kwargs:
        yield Rewrite(spelt.kwargs[name], value, words)
    elif isinstance(spelt.node, ast.Call):
        yield Rewrite(spelt.node, with_argument(site.text(spelt.node), f"{name}={value}"), words)


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
        is_function = isinstance(call.func, ast.Attribute) and site.constant(call.func.value) is not None
        if ignored is None and not is_function:  # a module of the loss
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
