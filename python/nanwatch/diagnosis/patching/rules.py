"""Rules: which changes of the source may end the failure of an operation, the smallest first."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

from .form_text import ATOM
from .guards import Facts, guard_mask, guard_mean, guarded, has_guard
from .matching import forms_of
from .site import Change, Rewrite, Site, Spelt
from .source import Edit, Span
from .written import DECOMPOSITIONS

_EXP = ("exp", "exp2", "expm1", "sinh", "cosh")
_LOG = ("log", "log2", "log10", "lgamma", "digamma")
_ARC = ("acos", "asin", "atanh", "acosh", "erfinv")
# Statements after the one that fails, each of which is searched for stable forms.
_MOST_LATER = 20
_LOSSES = ("nll_loss", "nll_loss_forward", "mse_loss", "l1_loss", "smooth_l1_loss", "binary_cross_entropy")

# Operations whose value is not finite for some finite operands, and those of which that holds for the derivative only.
POLES = frozenset(
    {*_EXP, *_LOG, *_ARC, "div", "reciprocal", "rsqrt", "log1p", "logit", "acosh", "tan", "xlogy"}
)
DERIVATIVE_POLES = frozenset({"sqrt", "pow", "acos", "asin", "acosh", "angle", "linalg_svd", "linalg_eigh"})
# By the name of an operation in the dispatcher or in the graph: the names in the source that run it, where they differ.
_SPELLINGS = {
    "reciprocal": ("div", "reciprocal"),
    "_softmax": ("softmax",),
    "_log_softmax": ("log_softmax",),
    "linalg_svd": ("svd",),
    "_linalg_svd": ("svd",),
    "linalg_eigh": ("eigh",),
    "_linalg_eigh": ("eigh",),
    "rsub": ("sub",),
    "native_layer_norm": ("layer_norm",),
    "native_batch_norm": ("batch_norm", "instance_norm"),
    "native_group_norm": ("group_norm",),
    "_ctc_loss": ("ctc_loss",),
    "linalg_vector_norm": ("norm", "normalize"),
}


def operation_name(operation: str) -> str:
    """Return the name in torch.ops.aten of `aten.div.Tensor`, or of the forward of `DivBackward0`."""
    if operation.startswith("aten."):
        return operation.split(".")[1].removesuffix("_")
    name = re.sub(r"Backward\d*$", "", operation.split("::")[-1])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().removesuffix("_")


def changes(site: Site, facts: Facts, position: Span | None = None) -> Iterator[Change]:
    """Yield the changes of the statement that may end the failure; `position` is of the expression that failed."""
    exact, spelt = _failing(site, facts, position)
    seen: set[tuple[Edit, ...]] = set()
    for change in _in_order(site, facts, exact, spelt):
        if change.edits not in seen:
            seen.add(change.edits)
            yield change


def at_definitions(site: Site, facts: Facts, position: Span | None) -> Iterator[Change]:
    """Yield the guards of the failing operation put where a local value is made, so that all its uses have them."""
    for one in _failing(site, facts, position)[0]:
        made = [site.definition(x) if site.num_uses(x) > 1 else None for x in one.args]
        if one.name == "mul" or not any(made):
            continue
        moved = one._replace(args=tuple(new or old for new, old in zip(made, one.args, strict=True)))
        for rewrite in guarded(site, moved, facts):
            if rewrite.node not in one.args and rewrite.node is not one.node:
                yield _change(site, None, [rewrite])


def hiding(site: Site, facts: Facts, position: Span | None) -> Change | None:
    """Return the change that puts 0 in place of what is not finite in the failing expression, if it can be found."""
    failing = failing_node(site, facts, position)
    if not isinstance(failing, ast.expr):
        return None
    text = f"{site.primary(failing)}.nan_to_num(0.0, 0.0, 0.0)"
    return _change(site, None, [Rewrite(failing, text, "put 0 in place of nan and inf")])


def failing_node(site: Site, facts: Facts, position: Span | None) -> ast.AST | None:
    """Return the expression that is likeliest to be the failing operation."""
    return next((one.node for one in _failing(site, facts, position)[0]), None)


def _failing(site: Site, facts: Facts, position: Span | None) -> tuple[list[Spelt], list[Spelt]]:
    """Return the expressions of the statement that may be the failing operation, the likeliest first, and all."""
    wanted = _SPELLINGS.get(facts.operation, (facts.operation,))
    spelt = list(site.expressions())
    exact = [one for one in spelt if one.name in wanted]
    if position is not None:
        at = [one for one in spelt if site.file.span(one.node) == position]
        # A module that runs the operation has a name of its own.
        exact = [one for one in at if one in exact or not exact] + [one for one in exact if one not in at]
    return exact, spelt


def _in_order(site: Site, facts: Facts, exact: list[Spelt], spelt: list[Spelt]) -> Iterator[Change]:
    yield from _stable_forms(site, spelt, {one.node for one in exact})
    for one in exact if facts.operation else spelt:
        for rewrite in _untaken(site, one):
            yield _change(site, one, [rewrite])
    choices = [list(guarded(site, one, facts)) for one in exact]
    for number in range(max(map(len, choices), default=0)):
        for one, rewrites in zip(exact, choices, strict=True):
            if number < len(rewrites):
                yield _change(site, one, [rewrites[number]])
        if len(choices) > 1:
            together = [rewrites[min(number, len(rewrites) - 1)] for rewrites in choices if rewrites]
            if len(together) > 1 and not _overlap(site, together):
                yield _change(site, exact[0], together)
    yield from _infinities(site, facts)
    if "softmax" in facts.operation:
        for one in spelt:
            for rewrite in guard_mask(site, one, facts):
                yield _change(site, one, [rewrite])
    others = [one for one in spelt if one not in exact and has_guard(one)]
    failing = {one.node for one in exact}
    for one in others:
        for rewrite in guarded(site, one, facts):
            # A change of the result of the failing operation would only hide its value.
            if failing.isdisjoint(ast.walk(rewrite.node)) or rewrite.node is one.node:
                yield _change(site, one, [rewrite])
    if facts.operation in _LOSSES or facts.operation == "mean":
        for one in spelt:
            for rewrite in guard_mean(site, one, facts):
                yield _change(site, one, [rewrite])


def later_forms(site: Site, facts: Facts, position: Span | None) -> Iterator[tuple[Site, Change]]:
    """Yield the stable forms of later statements that need the value no more, each with its statement."""
    failing = {one.node for one in _failing(site, facts, position)[0]}
    end = site.file.span(site.statement).end if isinstance(site.statement, ast.stmt) else None
    if end is None or not failing:
        return
    plain = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.Return | ast.Expr
    nodes = (one for one in ast.walk(site.target.node) if isinstance(one, plain))
    later = [one for one in nodes if site.file.span(one).start >= end]
    for one in later[:_MOST_LATER]:
        other = Site(site.target, one.lineno, site.file.span(one))
        for change in _stable_forms(other, list(other.expressions(whole=True)), failing, needs=True):
            yield other, change


def _stable_forms(
    site: Site, spelt: list[Spelt], failing: set[ast.AST], *, needs: bool = False
) -> Iterator[Change]:
    """Yield the forms of `forms` for expressions that hold or take in a failing node; with `needs` the latter only."""
    first: list[tuple[Spelt, Rewrite]] = []
    for one in spelt:
        if not isinstance(one.node, ast.expr):
            continue
        is_inside = not needs and any(x in failing for x in (one.node, *site.ancestors(one.node)))
        for number, form in enumerate(forms_of(site, one.node)):
            if failing and not (is_inside or failing & form.nodes):
                continue
            is_operand = isinstance(
                site.parent(one.node), ast.BinOp | ast.UnaryOp | ast.Attribute | ast.Subscript
            )
            text = f"({form.text})" if form.level < ATOM and is_operand else form.text
            rewrite = Rewrite(one.node, text, "use the stable form that torch has")
            if number == 0 and one.node in failing:
                first.append((one, rewrite))
            yield _change(site, one, [rewrite])._replace(is_stable=True)
    together = [rewrite for _, rewrite in first]
    if len(together) > 1 and not _overlap(site, together):
        yield _change(site, first[0][0], together)._replace(is_stable=True)


def _untaken(site: Site, spelt: Spelt) -> Iterator[Rewrite]:
    """Yield changes that give the elements that are not taken no operand, or a safe one.

    The gradient of an element that `where` or an index does not take is 0 times what comes of it.
    """
    inner: ast.AST = spelt.node
    for above in site.ancestors(spelt.node):
        if isinstance(above, ast.Subscript) and above.value is inner and isinstance(above.slice, ast.Name):
            names = [one for one in spelt.args if isinstance(one, ast.Name)]
            if names and isinstance(spelt.node, ast.Call):
                index = site.text(above.slice)
                text = site.text(spelt.node)
                start = site.file.span(spelt.node).start
                for one in sorted(names, key=lambda one: -one.col_offset):
                    end = site.file.span(one).end - start
                    data = text.encode()
                    text = (data[:end] + f"[{index}]".encode() + data[end:]).decode()
                yield Rewrite(above, text, f"compute the elements that `{index}` takes, and no others")
            return
        where = site.spelt(above)
        if where is not None and where.name == "where" and len(where.args) == 3 and site.torch:
            condition, yes, no = where.args
            place = next((one for one in (yes, no) if one is inner), None)
            if place is not None and (node := _variable(spelt)) is not None:
                text = site.text(condition)
                a, b = (site.text(node), "1.0") if place is yes else ("1.0", site.text(node))
                words = "give the branch that `where` does not take a safe operand"
                yield Rewrite(node, f"{site.torch}.where({text}, {a}, {b})", words)
            return
        inner = above


def _variable(spelt: Spelt) -> ast.expr | None:
    """Return the only operand that has names in it."""
    found = [x for x in spelt.args if any(isinstance(y, ast.Name) for y in ast.walk(x))]
    return found[0] if len(found) == 1 else None


def _infinities(site: Site, facts: Facts) -> Iterator[Change]:
    """Propose finite numbers for the infinities that the function writes."""
    lowest = "-6e4" if facts.dtype == "float16" else "-1e30"
    for node in ast.walk(site.target.node):
        if isinstance(node, ast.expr) and (value := site.constant(node)) in (float("inf"), -float("inf")):
            above = site.parent(node)
            if isinstance(above, ast.UnaryOp) and site.constant(above) is not None:
                continue
            # A softmax masks by large negative scores. Elsewhere inf may be meant, as where a minimum is taken.
            if value == float("inf") and "softmax" in facts.operation:
                yield _change(site, None, [Rewrite(node, lowest, "mask with a large negative number")])
            text = lowest if value == -float("inf") else lowest.removeprefix("-")
            yield _change(site, None, [Rewrite(node, text, "write a finite number for the infinity")])


def _overlap(site: Site, rewrites: Iterable[Rewrite]) -> bool:
    spans = sorted(site.span(one.node) for one in rewrites)
    return any(a.end > b.start for a, b in pairwise(spans))


def _change(site: Site, spelt: Spelt | None, rewrites: list[Rewrite]) -> Change:
    edits = tuple(Edit(site.span(one.node), one.text) for one in rewrites)
    looks: list[Span] = []
    # Vectors of equal singular values are any of many: of a decomposition the matrix is compared.
    node = None if spelt is None or spelt.name in DECOMPOSITIONS else spelt.node
    for edit in edits:
        around = _outermost(site, node) if isinstance(node, ast.expr) else None
        looks.append(around if around is not None and around.covers(edit.span) else edit.span)
    return Change(edits, rewrites[0].words, tuple(dict.fromkeys(looks)))


def _outermost(site: Site, node: ast.expr) -> Span:
    """Return the span of the expression whose value matters: of the `where` around it, as not all values are taken."""
    above = (site.spelt(one) for one in site.ancestors(node))
    return site.span(next((one.node for one in above if one is not None and one.name == "where"), node))
