"""The table of patches: spellings of a formula that fails, and the form or the guard that takes its place.

Rows are Python. A single capital letter stands for any expression, `N` for a number, `...` for further arguments, if any,
which the form gets as they were. Functions stand for every spelling: `log(X)` is `torch.log(X)`, `X.log()` and
`X.log_()`, `A / B` is also `torch.div(A, B)`. `W(X)` is a call of any function or module, and `W` in its form is that
call. `pick(X)` is X, or elements of it by any functions of PICKS, by which those of the form are then picked. ` | ` is
between the patterns of one row, and between its forms. A name in the source is followed to the assignment that made it.
Names of several capitals are numbers for the format at hand, see NUMBERS.
"""

# ruff: noqa: E501 - a row is a line

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

# Functions that are also written with operators.
SPELLINGS = (
    ("X ** 0.5", "sqrt(X)"),
    ("X ** 2", "square(X)"),
    ("X * X", "square(X)"),
    ("1 / sqrt(X)", "rsqrt(X)"),
    ("log(1 + X)", "log1p(X)"),
    ("exp(X) - 1", "expm1(X)"),
    ("1 / (1 + exp(-X))", "sigmoid(X)"),
    ("exp(X) / (1 + exp(X))", "sigmoid(X)"),
    ("log(softmax(X, ...))", "log_softmax(X, ...)"),
    ("A + -B", "A - B"),
)
# Names of one function, or of one argument.
ALIASES = {
    "true_divide": "div", "divide": "div", "multiply": "mul", "subtract": "sub", "negative": "neg", "arccos": "acos",
    "arcsin": "asin", "arctanh": "atanh", "arccosh": "acosh", "clip": "clamp", "float_power": "pow", "absolute": "abs",
    "vector_norm": "norm", "mm": "matmul", "bmm": "matmul", "diagonal": "diag", "axis": "dim", "keepdims": "keepdim",
}  # fmt: skip

# Functions that pick or arrange elements of their first operand.
PICKS = frozenset({
    "item", "gather", "index_select", "take_along_dim", "select", "narrow", "diag", "squeeze", "unsqueeze", "view", "reshape",
    "flatten", "permute", "transpose", "contiguous", "clone",
})  # fmt: skip

# Forms that compute the same and do not overflow, cancel, or divide 0 by 0. The first that applies is tried first.
_STABLE = (
    # Cross entropies by hand
    ("Y * log(sigmoid(X)) + (1 - Y) * log(1 - sigmoid(X))", '-F.binary_cross_entropy_with_logits(X, Y, reduction="none")'),
    ("Y * log(squeeze(sigmoid(X), ...)) + (1 - Y) * log(1 - squeeze(sigmoid(X), ...))", '-F.binary_cross_entropy_with_logits(X.squeeze(...), Y, reduction="none")'),
    ("Y * log(A) + (1 - Y) * log(1 - A)", '-F.binary_cross_entropy(A, Y, reduction="none")'),
    ("F.nll_loss(log(softmax(X, ...)), Y)", "F.cross_entropy(X, Y)"),
    ("F.binary_cross_entropy(sigmoid(X), Y)", "F.binary_cross_entropy_with_logits(X, Y)"),
    # Logarithms of exponentials
    ("log(exp(X))", "X"),
    ("log(pick(sigmoid(X)))", "F.logsigmoid(X)"),
    ("log(1 - pick(sigmoid(X))) | log(1 - pick(sigmoid(X)) + N)", "F.logsigmoid(-X)"),
    ("log(pick(softmax(X, ...)))", "F.log_softmax(X, ...)"),
    ("log(sum(softmax(X, dim=D) * M, ...))", "torch.logsumexp(F.log_softmax(X, dim=D) + torch.log(M), ...)"),
    ("log(mean(softmax(X, ...), dim=D))", "torch.logsumexp(F.log_softmax(X, ...), D) - math.log(X.shape[D])"),
    ("log(T * softmax(A, ...) + Q * softmax(B, ...))", "torch.logaddexp(torch.log(T) + F.log_softmax(A, ...), torch.log(Q) + F.log_softmax(B, ...))"),
    ("log1p(exp(X))", "F.softplus(X)"),
    ("log(exp(A) + exp(B))", "torch.logaddexp(A, B)"),
    ("log(expm1(X))", "X + torch.log(-torch.expm1(-X))"),
    ("log(1 - exp(X))", "torch.log(-torch.expm1(X))"),
    ("log(1 - square(tanh(X))) | log(1 - square(tanh(X)) + N)", "2.0 * (LN2 - X - F.softplus(-2.0 * X))"),
    ("log(cosh(X))", "X + F.softplus(-2.0 * X) - LN2"),
    ("log(sum(exp(X)))", "torch.logsumexp(X.flatten(), 0)"),
    ("log(sum(exp(X), ...)) | log(sum(exp(X), ...) + N)", "torch.logsumexp(X, ...)"),
    ("log(norm(exp(X), dim=D))", "0.5 * torch.logsumexp(2.0 * X, dim=D)"),
    ("log(mean(exp(X)))", "torch.logsumexp(X.flatten(), 0) - math.log(X.numel())"),
    ("log(mean(exp(X), dim=D))", "torch.logsumexp(X, dim=D) - math.log(X.shape[D])"),
    ("log(cumsum(exp(X), ...))", "torch.logcumsumexp(X, ...)"),
    ("log(sum(exp(X) * M, ...))", "torch.logsumexp(X + torch.log(M), ...)"),
    ("log(sum(exp(A) * M, ...) / sum(exp(B), ...))", "torch.logsumexp(A + torch.log(M), ...) - torch.logsumexp(B, ...)"),
    ("log(diag(exp(X)) / sum(exp(X), ...))", "X.diag() - torch.logsumexp(X, ...)"),
    ("log(exp(A) / sum(exp(B)))", "A - torch.logsumexp(B.flatten(), 0)"),
    ("log(exp(A) / sum(exp(B) * M, ...))", "A - torch.logsumexp(B + torch.log(M), ...)"),
    ("log(exp(A) / sum(exp(B), ...))", "A - torch.logsumexp(B, ...)"),
    ("log(exp(A) / (exp(A) + sum(exp(B), ...)))", "-F.softplus(torch.logsumexp(B, ...) - A)"),
    # Logarithms of products and of special functions
    ("log(det(X)) | log(abs(det(X))) | logdet(X)", "torch.linalg.slogdet(X)[1]"),
    ("log(prod(X, ...))", "torch.log(X).sum(...)"),
    ("log(cumprod(X, ...))", "torch.log(X).cumsum(...)"),
    ("log(i0(X))", "torch.log(torch.special.i0e(X)) + torch.abs(X)"),
    ("log(ndtr(X)) | log(0.5 * (1 + erf(X / 1.4142135623730951)))", "torch.special.log_ndtr(X)"),
    # Quotients of exponentials
    ("exp(X) / sum(exp(X), dim=D, keepdim=True) | exp(X) / unsqueeze(sum(exp(X), dim=D), ...)", "torch.softmax(X, dim=D)"),
    ("exp(X) / sum(exp(X))", "torch.softmax(X.flatten(), 0).view_as(X)"),
    ("exp(X) * M / sum(exp(X) * M, dim=D, keepdim=True)", "torch.softmax(X + torch.log(M), dim=D)"),
    ("sigmoid(X) / sum(sigmoid(X), dim=D, keepdim=True)", "torch.softmax(F.logsigmoid(X), dim=D)"),
    ("exp(A) / (exp(A) + exp(B))", "torch.sigmoid(A - B)"),
    ("1 / (1 + exp(-X)) | exp(X) / (1 + exp(X))", "torch.sigmoid(X)"),
    ("A * exp(X) / (1 + exp(X))", "A * torch.sigmoid(X)"),
    ("1 / (1 + exp(X))", "torch.sigmoid(-X)"),
    ("(exp(X) - exp(-X)) / (exp(X) + exp(-X))", "torch.tanh(X)"),
    ("expm1(X) / (exp(X) + 1)", "torch.tanh(0.5 * X)"),
    ("exp(A) / exp(B)", "torch.exp(A - B)"),
    ("exp(A) * exp(B)", "torch.exp(A + B)"),
    ("A / exp(X)", "A * torch.exp(-X)"),
    # Norms, distances, variances
    ("sum(A * B, dim=D) / (norm(A, dim=D) * norm(B, dim=D))", "F.cosine_similarity(A, B, dim=D)"),
    ("dot(A, B) / (norm(A) * norm(B))", "F.cosine_similarity(A, B, dim=0)"),
    ("sqrt(sum(square(X)))", "torch.linalg.vector_norm(X)"),
    ("sqrt(sum(square(X), dim=D))", "torch.linalg.vector_norm(X, dim=D)"),
    ("sqrt(sum(square(X), dim=D, keepdim=True))", "torch.linalg.vector_norm(X, dim=D, keepdim=True)"),
    ("sqrt(square(A) + square(B))", "torch.hypot(A, B)"),
    ("sqrt(square(X))", "X.abs()"),
    ("mean(square(X), ...) - square(mean(X, ...))", "X.var(..., unbiased=False)"),
    ("sqrt(var(X, ...))", "X.std(...)"),
    # 0 times infinity, 0 divided by 0
    ("T * (log(T) - Q)", "torch.xlogy(T, T) - T * Q"),
    ("A * log(B)", "torch.xlogy(A, B)"),
    ("sin(X) / X", "torch.sinc(X / PI)"),
    ("expm1(X) / X", "torch.where(X == 0, 1.0, torch.expm1(X) / torch.where(X == 0, 1.0, X))"),
    # What cancels or overflows on the way
    ("exp(X) - 1", "torch.expm1(X)"),
    ("1 - exp(X)", "-torch.expm1(X)"),
    ("log(1 + X)", "torch.log1p(X)"),
    ("A @ B / S", "(A / S) @ B"),
    ("(A @ B) * S", "(A * S) @ B"),
    ("A * B / C", "A * (B / C)"),
)  # fmt: skip

STABLE_WORDS = "use the stable form that torch has"
_DIVISOR = "keep the divisor away from 0"
_ROOT = "keep what the root is taken of away from 0"
_ROOTED = "add an eps inside the root"
_LOG = "keep what the logarithm is taken of away from 0"
_EXPONENT = "bound the exponent"
_INSIDE = "keep the operand inside -1 to 1"
EPS_WORDS = "give it an eps that the format has"
_UNBIASED = "do not divide by the number of values less one, which is 0 for a single value"
_UNWRITTEN = "begin with zeros, as memory that nothing has written holds anything"
TOO_SHORT = "leave out samples that are shorter than their labels, whose loss is infinite"
_UNIFORM = "mask with a finite score, so that a row masked everywhere becomes uniform"
_STEEP = "whose gradient is infinite"
_QUOTIENTS = "A / B | reciprocal(B) | addcdiv(X, A, B, ...)"
_EXPS = "exp(X) | exp2(X) | expm1(X) | sinh(X) | cosh(X)"
_NORMALIZED = "X / norm(X, dim=D, keepdim=True) | X / unsqueeze(norm(X, dim=D), ...) | X / sqrt(sum(square(X), dim=D, keepdim=True))"


class Row(NamedTuple):
    """A guard of the operation that failed: its pattern, and the part of it that is written anew, "" for the whole.

    The `condition` is words: the operand is `empty`, a Python `number`, an `int`, a `count` (integers, or whole numbers
    whose source says that they count), `zero` (0 or far from it in float64 too), `positive` (no difference, and float64
    shows nothing below 0), or a `fraction` (nothing above 1 either); each letter is `variable`, and no number; no name
    in the pattern is used elsewhere (`sole`); the exponent has a `pole` at 0, or a `bound` that float64 shows, or no
    logarithm takes what comes of it (`unlogged`), which would undo it; the call failed `in` one of these operations.
    A guard that `spreads` is tried first for all uses of the operand, where its name is made if it has one: else an
    operation that does not see it fails too, or pulls the other way.
    """

    pattern: str
    part: str
    form: str
    condition: str
    words: str
    spreads: bool = False
    kind: str = "guard"


_ROWS = (
    Row("log_prob(A, B)", "B", "B.clamp(min=NEAR)", "positive in xlogy log", "keep the value off the edge of the distribution"),
    Row("log_prob(A, B)", "B", "B.clamp(NEAR, 1 - NEAR)", "fraction in xlogy log log1p", "keep the value off the edges of the distribution"),
    Row("W(X, Y, ..., weight=M)", "", "W if M[Y[(Y >= 0) & (Y < len(M))]].any() else X.sum() * 0.0", "in nll_loss", "take 0 where all classes have weight 0"),
    Row("W(X, Y, ...)", "", "W if (Y != -100).any() else X.sum() * 0.0", "in nll_loss", "take 0 where all labels are ignored"),
    Row("W(X, ...)", "", "W if X.numel() else X.sum() * 0.0", "empty in nll_loss mse_loss l1_loss smooth_l1_loss binary_cross_entropy binary_cross_entropy_with_logits mean", "take 0 for the mean of nothing"),
    Row("W(..., mask=M)", "M", "M & ~M.all(-1, keepdim=True)", "in softmax _softmax _safe_softmax", "mask no row everywhere"),
    Row("W(..., mask=M)", "M", "torch.where(M, LOWEST, 0.0)", "in softmax _softmax _safe_softmax", _UNIFORM),
    Row("empty(...) | Tensor(...) | FloatTensor(...)", "", "torch.zeros(...)", "in empty", _UNWRITTEN),
    Row("empty_like(X, ...)", "", "torch.zeros_like(X, ...)", "in empty_like", _UNWRITTEN),
    Row("new_empty(X, ...)", "", "X.new_zeros(...)", "in new_empty", _UNWRITTEN),
    Row("A / B", "B", "max(B, 1)", "int", "divide by at least 1"),
    Row("A / B", "B", "max(B, EPS)", "number", _DIVISOR),
    Row(_QUOTIENTS, "B", "B.clamp(min=1)", "count", "divide by at least 1"),
    Row("A / exp(X) | reciprocal(exp(X))", "X", "X.clamp(-SAFE, SAFE) | X.clamp(-CALM, CALM)", "", _EXPONENT, True),
    Row(_NORMALIZED, "", "F.normalize(X, dim=D)", "sole", STABLE_WORDS),
    Row("A / (N * B)", "B", "B.clamp(min=EPS) | B.clamp(min=MILD)", "positive", _DIVISOR, True),
    Row(_QUOTIENTS, "B", "B.clamp(min=EPS)", "positive", _DIVISOR, True),
    Row(_QUOTIENTS, "B", "torch.where(B.abs() < EPS, EPS, B)", "", _DIVISOR, True),
    Row(_QUOTIENTS, "B", "B.clamp(min=MILD)", "positive", _DIVISOR, True),
    Row("A / B", "", "torch.where(B == 0, 0.0, A / torch.where(B == 0, 1.0, B))", "zero", "take 0 where the divisor is 0"),
    Row(_QUOTIENTS, "B", "torch.where(B.abs() < MILD, MILD, B)", "", _DIVISOR, True),
    Row("A / B", "B", "B + LARGER", "positive", "add an eps to the divisor"),
    Row("sqrt(X)", "X", "X.clamp(min=0)", "", "keep what the root is taken of from being negative"),
    Row("rsqrt(X)", "X", "X.clamp(min=1)", "count", "take the root of at least 1"),
    Row("sqrt(X)", "X", "X.clamp(min=TINY) | X.clamp(min=EPS) | X + EPS", "", _ROOT),
    Row("rsqrt(X)", "X", "X.clamp(min=TINY) | X + EPS", "", _ROOT),
    Row("X ** P", "X", "X.clamp(min=1)", "count", "take the power of at least 1"),
    Row("X ** P", "X", "X.clamp(min=TINY) | X.clamp(min=EPS)", "pole", "keep what the power is taken of away from 0"),
    Row("log(X) | log2(X) | log10(X)", "X", "X.clamp(min=TINY) | X.clamp(min=LEAST) | X.clamp(min=EPS) | X + LARGER", "", _LOG),
    Row("log1p(X)", "X", "X.clamp(min=-1 + NEAR)", "", "keep what log1p is taken of above -1"),
    Row("lgamma(X) | digamma(X)", "X", "X.clamp(min=TINY)", "", "keep the operand away from 0"),
    Row("xlogy(A, B)", "B", "B.clamp(min=TINY)", "", _LOG),
    Row(_EXPS, "X", "X.clamp(max=BOUND)", "bound", "bound the exponent as float64 shows it", True),
    Row(_EXPS, "X", "X.clamp(max=SAFE) | X.clamp(max=HALF) | X.clamp(max=MOST) | X.clamp(max=CALM) | X.clamp(max=2)", "unlogged", _EXPONENT, True),
    Row("acosh(X)", "X", "X.clamp(min=1 + NEAR)", "", "keep the operand of acosh above 1"),
    Row("acos(X) | asin(X)", "X", "X.clamp(-1, 1)", "", _INSIDE),
    Row("acos(X) | asin(X) | atanh(X) | erfinv(X)", "X", "X.clamp(-1 + NEAR, 1 - NEAR)", "", _INSIDE),
    Row("logit(X, ...)", "", "torch.logit(X, eps=NEAR)", "", EPS_WORDS),
    Row("atan2(Y, X)", "X", "torch.where((X == 0) & (Y == 0), EPS, X)", "variable", "take no angle of (0, 0)"),
    Row("hypot(A, B)", "", "torch.sqrt(A**2 + B**2 + TINY)", "", _ROOTED),
    Row("angle(X)", "", "torch.atan2(X.imag, X.real)", "", "take the angle by atan2, whose gradient at 0 is 0"),
    Row("norm(X, ...)", "", "torch.sqrt((X**2).sum(...) + TINY)", "", _ROOTED),
    Row("softmax(X, ...) | log_softmax(X, ...) | logsumexp(X, ...)", "X", "X.clamp(min=LOWEST)", "", _UNIFORM),
    Row("A - B", "B", "B.clamp(min=LOWEST)", "", "keep the operand from being -inf"),
    Row("A * B", "B", "torch.where(A == 0, 0.0, B)", "variable", "take 0 where the other factor is 0"),
    Row("A * B", "A", "torch.where(B == 0, 0.0, A)", "variable", "take 0 where the other factor is 0"),
    Row("std(X, dim=D)", "", "X.std(dim=D, unbiased=X.shape[D] > 1)", "", _UNBIASED),
    Row("std(X, ...)", "", "X.std(..., unbiased=False)", "", _UNBIASED),
    Row("var(X, ...)", "", "X.var(..., unbiased=False)", "", _UNBIASED),
    Row("std(X, ...)", "", "torch.sqrt(X.var(..., unbiased=False) + EPS)", "", _ROOTED),
    Row("mean(X)", "", "X.sum() / max(X.numel(), 1)", "empty", "take 0 for the mean of nothing"),
    Row("mean(X, dim=D)", "", "X.sum(D) / max(X.shape[D], 1)", "empty", "take 0 for the mean of nothing"),
    Row("normalize(X, ...)", "", "F.normalize(X, ..., eps=EPS)", "", EPS_WORDS),
    Row("cosine_similarity(A, B, ...)", "", "F.cosine_similarity(A, B, ..., eps=LARGER)", "", EPS_WORDS),
    Row("layer_norm(X, ...)", "", "F.layer_norm(X, ..., eps=1e-5)", "", EPS_WORDS),
    Row("ctc_loss(A, B, ...)", "", "F.ctc_loss(A, B, ..., zero_infinity=True)", "", TOO_SHORT),
    Row("poisson_nll_loss(X, Y, ...)", "X", "X.clamp(min=EPS)", "", "keep the rate from being negative"),
    Row("poisson_nll_loss(X, Y)", "X", "X.clamp(max=SAFE)", "", _EXPONENT),
    Row("eigh(X)", "X", "X + torch.diag(torch.linspace(0, 1e-4, X.shape[-1]).to(X))", "", f"move equal eigenvalues apart, {_STEEP}"),
    Row("svd(X, ...)", "X", "X + torch.eye(*X.shape[-2:]).to(X) * torch.linspace(0, 1e-4, X.shape[-1]).to(X)", "", f"move equal singular values apart, {_STEEP}"),
)  # fmt: skip


def _split(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return a row for each form, and in that for each pattern."""
    forms = (row._replace(form=form) for row in rows for form in row.form.split(" | "))
    return tuple(row._replace(pattern=pattern) for row in forms for pattern in row.pattern.split(" | "))


STABLE = _split(Row(patterns, "", form, "", STABLE_WORDS, kind="stable") for patterns, form in _STABLE)
GUARDS = _split(_ROWS)
# fmt: off
FORMATS = "float16", "bfloat16", "float32", "float64"  # the narrowest first
NUMBERS = {
    # Large enough for the inverse, and the inverse of the square, to stay in the format; small against healthy values.
    "EPS": ("1e-4", "1e-8", "1e-8", "1e-12"),
    "LARGER": ("1e-3", "1e-6", "1e-6", "1e-6"),
    "TINY": ("1e-4", "1e-12", "1e-12", "1e-24"),
    "LEAST": ("1e-7", "1e-30", "1e-30", "1e-300"),
    # The distance from 1 at which a derivative with a pole there is of moderate size.
    "NEAR": ("1e-3", "1e-2", "1e-6", "1e-9"),
    # The floor of a divisor whose quotients, and their gradients, a training survives.
    "MILD": ("1e-2", "1e-3", "1e-3", "1e-3"),
    # A training survives steps by the gradient of the exponential of CALM, and of its inverse. That of SAFE leaves room
    # for what follows. The square of that of HALF is still in the format, and that of MOST is near its end.
    "CALM": ("3", "5", "5", "5"),
    "SAFE": ("5", "20", "20", "40"),
    "HALF": ("5", "40", "40", "350"),
    "MOST": ("10", "80", "80", "700"),
    # A score and a second mask can be added to it.
    "LOWEST": ("-3e4", "-1e30", "-1e30", "-1e30"),
    "LN2": (repr(math.log(2)),) * 4,
    "PI": (repr(math.pi),) * 4,
}
# fmt: on


def numbers_of(dtype: str) -> dict[str, str]:
    """Return the numbers for a format, those of float32 where the table does not have it."""
    column = FORMATS.index(dtype) if dtype in FORMATS else 2
    return {name: values[column] for name, values in NUMBERS.items()}


# Operations whose value is not finite for some finite operands.
POLES = frozenset({
    "exp", "exp2", "expm1", "sinh", "cosh", "log", "log2", "log10", "lgamma", "digamma", "acos", "asin", "atanh", "acosh",
    "erfinv", "div", "reciprocal", "rsqrt", "log1p", "logit", "tan", "xlogy",
})  # fmt: skip
# By the name of an operation: the names in the source that run it, where they differ.
_RUN_BY = {
    "reciprocal": ("div", "reciprocal", "pow"),
    "softmax": ("softmax", "sigmoid"),
    "log_softmax": ("log_softmax", "cross_entropy"),
    "rsub": ("sub",),
    "vector_norm": ("norm", "normalize", "cosine_similarity"),
    "sqrt": ("sqrt", "pow"),
    "pow": ("pow", "square", "sqrt"),
}


def operation_name(operation: str) -> str:
    """Return the name in torch.ops.aten of `aten.div.Tensor`, or of the forward of `DivBackward0`."""
    if operation.startswith("aten."):
        return operation.split(".")[1].removesuffix("_")
    name = re.sub(r"Backward\d*$", "", operation.split("::")[-1])
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().removesuffix("_")


def names_that_run(operation: str) -> tuple[str, ...]:
    """Return the names in the source that run an operation of the dispatcher or of the graph."""
    name = re.sub("^_?(linalg_|native_)?", "", operation)
    return _RUN_BY.get(name, (name,))
