"""What the source says of a value by its names and its operations: that it counts something, that it has no sign."""

from __future__ import annotations

import ast
import re

from .site import Site

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
# Whole words in the name of a value whose definition is elsewhere, without the `s` of a plural: `num_tokens` and
# `n_valid` are counts, `numerator` and `discount` are not.
_COUNTS = frozenset({"count", "cnt", "num", "number", "n", "length", "len", "degree", "deg", "size", "numel"})
_SIZES = frozenset({"mask", "std", "sigma", "var", "variance", "norm"})
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
# Operations that give a count for any operand, and those whose result is one if their operand is.
_COUNTING = frozenset({"sum", "cumsum", "numel", "count_nonzero", "bincount", "len", "size"})
_OF_COUNTS = _SIGNED_AS_GIVEN | {"clamp", "clamp_min", "long", "int", "sub"}


def words(name: str) -> set[str]:
    """Return the words of a name in snake_case or camelCase, in lower case and without the `s` of a plural."""
    found = {one.lower() for one in _WORD.findall(name)}
    return found | {one.removesuffix("s") for one in found}


def name_of(node: ast.AST) -> str:
    """Return the name that a node is, or the last part of a dotted one."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def is_count(site: Site, node: ast.expr, depth: int = 4) -> bool:
    """Return whether the source says that whole numbers in this value count something.

    A sum does, of a mask or of what was seen to be whole; a name does by its words.
    """
    if not _COUNTS.isdisjoint(words(name_of(node))):
        return True
    node = site.definition(node) or node
    if isinstance(node, ast.Subscript):
        return is_count(site, node.value, depth)
    spelt = site.spelt(node) if depth else None
    if spelt is None:
        return isinstance(node, ast.Attribute) and node.attr == "shape"
    is_kept = spelt.name in _OF_COUNTS and is_count(site, spelt.args[0], depth - 1)
    return spelt.name in _COUNTING or is_kept


def bounds_of(site: Site, node: ast.expr) -> tuple[ast.expr, dict[str, ast.expr]] | None:
    """Return what the node clamps and its bounds; None where it clamps nothing."""
    spelt = site.spelt(node)
    if spelt is None or spelt.name not in ("clamp", "clamp_min", "clamp_max") or not spelt.args:
        return None
    names = {"clamp": ("min", "max"), "clamp_min": ("min",), "clamp_max": ("max",)}[spelt.name]
    bounds = dict(zip(names, spelt.args[1:], strict=False))
    return spelt.args[0], {**bounds, **{k: v for k, v in spelt.kwargs.items() if k in ("min", "max")}}


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
        name = name_of(node)
        return not _COUNTS.isdisjoint(words(name)) or not _SIZES.isdisjoint(words(name))
    if spelt.name in ("clamp", "clamp_min"):
        bounds = bounds_of(site, node)
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
