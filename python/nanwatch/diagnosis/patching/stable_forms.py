"""Stable forms: expressions by hand for which torch has a function that neither overflows nor underflows."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .expressions import Rewrite, Site, Spelt


def stable_forms(site: Site, spelt: Spelt) -> Iterator[Rewrite]:
    """Yield the stable forms of an operation, of which its operands are the unstable part."""
    if spelt.name in ("log", "log1p"):
        yield from _logarithm(site, spelt)
    elif spelt.name == "mul" and len(spelt.args) == 2:
        yield from _entropy(site, spelt)


def _logarithm(site: Site, spelt: Spelt) -> Iterator[Rewrite]:
    node = spelt.args[0]
    inner = site.meaning(node)
    if inner is None:
        return
    torch, f = site.torch, site.functional

    def form(text: str) -> Rewrite:
        return Rewrite(spelt.node, text, "use the stable form that torch has")

    if spelt.name == "log1p":
        if inner.name == "exp" and f:
            yield form(f"{f}.softplus({site.text(inner.args[0])})")
        return
    if inner.name == "softmax" and isinstance(inner.node, ast.Call):
        yield form(site.text(inner.node).replace("softmax(", "log_softmax(", 1))
    if inner.name == "sigmoid" and f:
        yield form(f"{f}.logsigmoid({site.text(inner.args[0])})")
    if inner.name == "sub" and site.constant(inner.args[0]) == 1 and f:
        rest = site.meaning(inner.args[1])
        if rest is not None and rest.name == "sigmoid":
            yield form(f"{f}.logsigmoid(-{site.operand(rest.args[0])})")
        if (x := _squared_tanh(site, rest)) is not None:
            a = site.operand(x)
            # log(1 - tanh(x)**2), with log(2) as a number.
            yield form(f"(2.0 * (0.6931471805599453 - {a} - {f}.softplus(-2.0 * {a})))")
    if inner.name == "add" and f:
        for one, other in (inner.args[:2], inner.args[1::-1]):
            rest = site.meaning(other)
            if site.constant(one) == 1 and rest is not None and rest.name == "exp":
                yield form(f"{f}.softplus({site.text(rest.args[0])})")
    if inner.name in ("sum", "cumsum") and isinstance(inner.node, ast.Call):
        rest = site.meaning(inner.args[0])
        if rest is not None and rest.name == "exp":
            name = "logsumexp" if inner.name == "sum" else "logcumsumexp"
            others = [site.text(x) for x in inner.args[1:]]
            others += [f"{key}={site.text(x)}" for key, x in inner.kwargs.items()]
            if others and torch:
                yield form(f"{torch}.{name}({', '.join((site.text(rest.args[0]), *others))})")
    if inner.name == "det" and torch:
        yield form(f"{torch}.logdet({site.text(inner.args[0])})")
    if inner.name == "div" and torch:
        x, rest = inner.args[0], site.meaning(inner.args[1])
        is_rest = rest is not None and rest.name == "sub" and site.constant(rest.args[0]) == 1
        if rest is not None and is_rest and site.text(rest.args[1]) == site.text(x):
            yield form(f"{torch}.logit({site.text(x)}, eps=1e-6)")


def _squared_tanh(site: Site, spelt: Spelt | None) -> ast.expr | None:
    """The operand of a tanh that is squared."""
    if spelt is None or not (
        spelt.name == "square"
        or (spelt.name == "pow" and len(spelt.args) > 1 and site.constant(spelt.args[1]) == 2)
    ):
        return None
    inner = site.meaning(spelt.args[0])
    return inner.args[0] if inner is not None and inner.name == "tanh" else None


def _entropy(site: Site, spelt: Spelt) -> Iterator[Rewrite]:
    """p * log(p), which is 0 at 0."""
    for factor, other in (spelt.args, spelt.args[::-1]):
        log = site.meaning(other)
        if (
            log is not None
            and log.name == "log"
            and site.text(log.args[0]) == site.text(factor)
            and site.torch
        ):
            p = site.text(factor)
            yield Rewrite(spelt.node, f"{site.torch}.xlogy({p}, {p})", "take 0 for 0 times its logarithm")
