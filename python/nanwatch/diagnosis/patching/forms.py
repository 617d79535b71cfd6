"""Stable forms: what torch has for a formula by hand, as a table of patterns, and the search for them in the source.

A pattern is written as Python, with the plain names of the operations. A single letter stands for any expression, `n`
for a number, `**r` for the other arguments of a reduction. It matches every spelling: `x.square()` and `x * x` are
`x**2`, `torch.rsqrt(x)` is `1 / sqrt(x)`, and a local name is what was assigned to it.
"""

from __future__ import annotations

import ast
from functools import cache

# The form that a reviewer would want first stands first. In a form `LOG(x)` is the simplest logarithm of `x` that this
# table knows, `MUST(x)` the same where it knows one, LN2 the logarithm of 2. `**r` are arguments as they were given,
# `**k` the same by name.
_TABLE = """
-mean(y * LOGITS + (1 - y) * REST) -> F.binary_cross_entropy_with_logits(x, y)
-(y * LOGITS + (1 - y) * REST) -> F.binary_cross_entropy_with_logits(x, y, reduction="none")
-y * LOGITS - (1 - y) * REST -> F.binary_cross_entropy_with_logits(x, y, reduction="none")
y * LOGITS + (1 - y) * REST -> -F.binary_cross_entropy_with_logits(x, y, reduction="none")
-mean(y * log(p) + (1 - y) * log(1 - p)) -> F.binary_cross_entropy(p, y)
-(y * log(p) + (1 - y) * log(1 - p)) -> F.binary_cross_entropy(p, y, reduction="none")
-y * log(p) - (1 - y) * log(1 - p) -> F.binary_cross_entropy(p, y, reduction="none")
y * log(p) + (1 - y) * log(1 - p) -> -F.binary_cross_entropy(p, y, reduction="none")

log(exp(x)) -> x
log(sigmoid(x)) -> F.logsigmoid(x)
log(1 - sigmoid(x)) -> F.logsigmoid(-x)
log(1 / (1 + exp(x))) -> F.logsigmoid(-x)
log(softmax(x, **r)) -> F.log_softmax(x, **r)
log(exp(x) - 1) -> x + torch.log(-torch.expm1(-x))
log(exp(a) - exp(b)) -> a + torch.log(-torch.expm1(b - a))
log(1 - exp(x)) -> torch.log(-torch.expm1(x))
log(1 + exp(x)) -> F.softplus(x)
log(exp(a) + exp(b)) -> torch.logaddexp(a, b)
log(sum(exp(x))) -> torch.logsumexp(x.flatten(), dim=0)
log(sum(exp(x), **r)) -> torch.logsumexp(x, **r)
log(cumsum(exp(x), **r)) -> torch.logcumsumexp(x, **r)
log(mean(exp(x), dim=d, **r)) -> torch.logsumexp(x, dim=d, **r) - math.log(x.shape[d])
log(sum(x, **r)) -> torch.logsumexp(MUST(x), **r)
log(cumsum(x, **r)) -> torch.logcumsumexp(MUST(x), **r)
log(det(x)) -> torch.logdet(x)
log(abs(det(x))) -> torch.linalg.slogdet(x)[1]
log(prod(x, **r)) -> torch.log(x).sum(**r)
log(cumprod(x, **r)) -> torch.log(x).cumsum(**r)
log(1 - tanh(x)**2) -> 2.0 * (LN2 - x - F.softplus(-2.0 * x))
log(cosh(x)) -> x.abs() + F.softplus(-2.0 * x.abs()) - LN2
log(sinh(x)) -> x + torch.log(-torch.expm1(-2.0 * x)) - LN2
log(x + sqrt(x**2 + 1)) -> torch.asinh(x)
log(x + sqrt(x**2 - 1)) -> torch.acosh(x)
log(ndtr(x)) -> torch.special.log_ndtr(x)
log(1 - ndtr(x)) -> torch.special.log_ndtr(-x)
log(erfc(x)) -> torch.special.log_ndtr(-1.4142135623730951 * x) + LN2
log(i0(x)) -> torch.log(torch.special.i0e(x)) + x.abs()
log(i1(x)) -> torch.log(torch.special.i1e(x)) + x.abs()
log(x**n) -> n * LOG(x)
log(sqrt(x)) -> 0.5 * LOG(x)
log(1 / x) -> -LOG(x)
log(a + b) -> torch.logaddexp(MUST(a), MUST(b))
log(x / (1 - x)) -> torch.logit(x, eps=1e-6)
log(a * b) -> LOG(a) + LOG(b)
log(a / b) -> LOG(a) - LOG(b)

x / (1 + exp(-x)) -> F.silu(x)
1 / (1 + exp(x)) -> torch.sigmoid(-x)
exp(x) / (1 + exp(x)) -> torch.sigmoid(x)
exp(x) / (1 + exp(x))**2 -> torch.sigmoid(x) * torch.sigmoid(-x)
a / (1 + exp(x)) -> a * torch.sigmoid(-x)
exp(x) / sum(exp(x), dim=d, keepdim=True) -> torch.softmax(x, dim=d)
(exp(x) - exp(-x)) / (exp(x) + exp(-x)) -> torch.tanh(x)
(exp(2 * x) - 1) / (exp(2 * x) + 1) -> torch.tanh(x)
(exp(x) - 1) / (exp(x) + 1) -> torch.tanh(0.5 * x)
(1 - exp(x)) / (1 + exp(x)) -> torch.tanh(-0.5 * x)
1 / cosh(x) -> torch.exp(LN2 - x.abs() - F.softplus(-2.0 * x.abs()))
exp(a) / exp(b) -> torch.exp(a - b)
exp(a) * exp(b) -> torch.exp(a + b)
1 / exp(x) -> torch.exp(-x)
a / exp(x) -> a * torch.exp(-x)
sqrt(exp(x)) -> torch.exp(0.5 * x)
exp(x)**n -> torch.exp(n * x)
i1(x) / i0(x) -> torch.special.i1e(x) / torch.special.i0e(x)

x / norm(x, dim=d, keepdim=True) -> F.normalize(x, dim=d)
x / sqrt(sum(x**2, dim=d, keepdim=True)) -> F.normalize(x, dim=d)
x * (1 / sqrt(sum(x**2, dim=d, keepdim=True))) -> F.normalize(x, dim=d)
x / norm(x) -> F.normalize(x, dim=0)
x / sqrt(sum(x**2)) -> F.normalize(x, dim=0)
sum(a * b, dim=d) / (norm(a, dim=d) * norm(b, dim=d)) -> F.cosine_similarity(a, b, dim=d)
dot(a, b) / (norm(a) * norm(b)) -> F.cosine_similarity(a, b, dim=0)
sum(a * b) / (norm(a) * norm(b)) -> F.cosine_similarity(a, b, dim=0)
a @ T(b) / (norm(a, dim=d, keepdim=True) * T(norm(b, dim=e, keepdim=True))) -> ROWS
a @ T(b) / (column(norm(a, dim=d)) * row(norm(b, dim=e))) -> ROWS
a @ T(b) / outer(norm(a, dim=d), norm(b, dim=e)) -> ROWS
a @ b / c -> (a / c) @ b
c * (a @ b) -> (c * a) @ b
sqrt(mean(x**2, **r) - mean(x, **r)**2) -> x.std(**r, unbiased=False)
mean(x**2, **r) - mean(x, **r)**2 -> x.var(**r, unbiased=False)
sqrt(mean(x**2) - mean(x)**2) -> x.std(unbiased=False)
mean(x**2) - mean(x)**2 -> x.var(unbiased=False)
sqrt(sum(x**2)) -> torch.linalg.vector_norm(x)
sqrt(sum(x**2, **k)) -> torch.linalg.vector_norm(x, **k)
sqrt(x**2 + y**2) -> torch.hypot(x, y)
sqrt(x**2 + 1) -> torch.hypot(x, torch.ones_like(x))
sqrt(x**2) -> x.abs()
sum(x, dim=d) / size(x, d) -> x.mean(d)
sum(x) / numel(x) -> x.mean()

sin(3.141592653589793 * x) / (3.141592653589793 * x) -> torch.sinc(x)
sin(x) / x -> torch.sinc(x / 3.141592653589793)
p * log2(p) -> torch.xlogy(p, p) / LN2
t * (log(t) - q) -> torch.xlogy(t, t) - t * q
a * log(b) -> torch.xlogy(a, b)
1 / (1 / a + 1 / b) -> a * b / (a + b)
exp(x) - 1 -> torch.expm1(x)
1 - exp(x) -> -torch.expm1(x)
log(1 + x) -> torch.log1p(x)
log(1 - x) -> torch.log1p(-x)
x**n / y**n -> (x / y)**n
sqrt(a * b) -> torch.sqrt(a) * torch.sqrt(b)
a * b / c -> a * (b / c)
"""


# What several lines have.
_PARTS = {
    "LOGITS": "log(sigmoid(x))",
    "REST": "log(1 - sigmoid(x))",
    "ROWS": "F.normalize(a, dim=d) @ T(F.normalize(b, dim=e))",
}


@cache
def table() -> tuple[tuple[ast.expr, ast.expr], ...]:
    """Return the patterns with their forms, parsed once."""
    text = _TABLE
    for name, part in _PARTS.items():
        text = text.replace(name, part)
    rows = (line.split(" -> ") for line in text.splitlines() if line)
    return tuple((_parsed(pattern), _parsed(form)) for pattern, form in rows)


def _parsed(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body
