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

import re
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
    ("F.nll_loss(log(softmax(X, ...)), Y)", "F.cross_entropy(X, Y)"),
    # Logarithms of exponentials
    ("log(exp(X))", "X"),
    ("log(pick(sigmoid(X)))", "F.logsigmoid(X)"),
    ("log(1 - pick(sigmoid(X))) | log(1 - pick(sigmoid(X)) + N)", "F.logsigmoid(-X)"),
    ("log(pick(softmax(X, ...)))", "F.log_softmax(X, ...)"),
    ("log(mean(softmax(X, ...), dim=D))", "torch.logsumexp(F.log_softmax(X, ...), D) - math.log(X.shape[D])"),
    ("log(T * softmax(A, ...) + Q * softmax(B, ...))", "torch.logaddexp(torch.log(T) + F.log_softmax(A, ...), torch.log(Q) + F.log_softmax(B, ...))"),
    ("log1p(exp(X))", "F.softplus(X)"),
    ("log(sum(exp(X), ...)) | log(sum(exp(X), ...) + N)", "torch.logsumexp(X, ...)"),
    ("log(diag(exp(X)) / sum(exp(X), ...))", "X.diag() - torch.logsumexp(X, ...)"),
    ("log(det(X)) | log(abs(det(X))) | logdet(X)", "torch.linalg.slogdet(X)[1]"),
    # Quotients of exponentials
    ("exp(X) / sum(exp(X), dim=D, keepdim=True) | exp(X) / unsqueeze(sum(exp(X), dim=D), ...)", "torch.softmax(X, dim=D)"),
    ("sigmoid(X) / sum(sigmoid(X), dim=D, keepdim=True)", "torch.softmax(F.logsigmoid(X), dim=D)"),
    ("1 / (1 + exp(-X))", "torch.sigmoid(X)"),
    ("1 / (1 + exp(X))", "torch.sigmoid(-X)"),
    ("A / exp(X)", "A * torch.exp(-X)"),
    # Norms, variances
    ("sum(A * B, dim=D) / (norm(A, dim=D) * norm(B, dim=D))", "F.cosine_similarity(A, B, dim=D)"),
    ("sqrt(sum(square(X), dim=D))", "torch.linalg.vector_norm(X, dim=D)"),
    ("sqrt(sum(square(X), dim=D, keepdim=True))", "torch.linalg.vector_norm(X, dim=D, keepdim=True)"),
    ("sqrt(var(X, ...))", "X.std(...)"),
    # 0 times infinity
    ("T * (log(T) - Q)", "torch.xlogy(T, T) - T * Q"),
    ("A * log(B)", "torch.xlogy(A, B)"),
    # A product that overflows on the way
    ("A @ B / S", "(A / S) @ B"),
    ("(A @ B) * S", "(A * S) @ B"),
)  # fmt: skip

STABLE_WORDS = "use the stable form that torch has"
_DIVISOR = "keep the divisor away from 0"
_ROOT = "keep what the root is taken of away from 0"
_LOG = "keep what the logarithm is taken of away from 0"
_EXPONENT = "bound the exponent"
_INSIDE = "keep the operand inside -1 to 1"
_EPS_WORDS = "give it an eps that the format has"
_UNBIASED = "do not divide by the number of values less one, which is 0 for a single value"
TOO_SHORT = "leave out samples that are shorter than their labels, whose loss is infinite"
_QUOTIENTS = "A / B | reciprocal(B)"


class Row(NamedTuple):
    """A guard of the operation that failed: its pattern, and the part of it that is written anew, "" for the whole.

    The `condition` is words: the operand is `empty`, a `count` (integers, or whole numbers whose source says that they
    count) or `positive` (no difference, and float64 shows nothing below 0); each letter is `variable`, and no number;
    no name in the pattern is used elsewhere (`sole`); the exponent has a `pole` at 0, or no logarithm takes what comes
    of it (`unlogged`), which would undo it; the call failed `in` one of these operations.
    A guard that `spreads` is tried first for all uses of the operand, where its name is made if it has one: else an
    operation that does not see it fails too, or pulls the other way.
    """

    pattern: str
    part: str
    form: str
    condition: str
    words: str
    spreads: bool = False


_ROWS = (
    Row("W(X, Y, ...)", "", "W if (Y != -100).any() else X.sum() * 0.0", "in nll_loss", "take 0 where all labels are ignored"),
    Row("W(X, ...)", "", "W if X.numel() else X.sum() * 0.0", "empty in nll_loss mse_loss l1_loss smooth_l1_loss binary_cross_entropy binary_cross_entropy_with_logits mean", "take 0 for the mean of nothing"),
    Row("W(..., mask=M)", "M", "M & ~M.all(-1, keepdim=True)", "in softmax _softmax _safe_softmax", "mask no row everywhere"),
    Row(_QUOTIENTS, "B", "B.clamp(min=1)", "count", "divide by at least 1"),
    Row("A / exp(X) | reciprocal(exp(X))", "X", "X.clamp(-SAFE, SAFE) | X.clamp(-CALM, CALM)", "", _EXPONENT, True),
    Row("X / norm(X, dim=D, keepdim=True)", "", "F.normalize(X, dim=D)", "sole", STABLE_WORDS),
    Row(_QUOTIENTS, "B", "B.clamp(min=EPS)", "positive", _DIVISOR, True),
    Row(_QUOTIENTS, "B", "torch.where(B.abs() < EPS, EPS, B)", "", _DIVISOR, True),
    Row(_QUOTIENTS, "B", "B.clamp(min=MILD)", "positive", _DIVISOR, True),
    Row("X ** P | rsqrt(X)", "X", "X.clamp(min=1)", "count", "take the power of at least 1"),
    Row("sqrt(X) | rsqrt(X)", "X", "X.clamp(min=TINY) | X.clamp(min=EPS)", "", _ROOT),
    Row("X ** P", "X", "X.clamp(min=TINY) | X.clamp(min=EPS)", "pole", "keep what the power is taken of away from 0"),
    Row("log(X) | log2(X) | log10(X)", "X", "X.clamp(min=TINY) | X.clamp(min=EPS)", "", _LOG),
    Row("xlogy(A, B)", "B", "B.clamp(min=TINY)", "", _LOG),
    Row("exp(X) | exp2(X) | expm1(X) | sinh(X) | cosh(X)", "X", "X.clamp(max=SAFE) | X.clamp(max=MOST) | X.clamp(max=CALM) | X.clamp(max=2)", "unlogged", _EXPONENT, True),
    Row("acos(X) | asin(X) | atanh(X) | erfinv(X)", "X", "X.clamp(-1 + NEAR, 1 - NEAR)", "", _INSIDE),
    Row("softmax(X, ...) | log_softmax(X, ...) | logsumexp(X, ...)", "X", "X.clamp(min=LOWEST)", "", "mask with a finite score, so that a row masked everywhere becomes uniform"),
    Row("A - B", "B", "B.clamp(min=LOWEST)", "", "keep the operand from being -inf"),
    Row("A * B", "B", "torch.where(A == 0, 0.0, B)", "variable", "take 0 where the other factor is 0"),
    Row("std(X, ...)", "", "X.std(..., unbiased=False)", "", _UNBIASED),
    Row("var(X, ...)", "", "X.var(..., unbiased=False)", "", _UNBIASED),
    Row("mean(X)", "", "X.sum() / max(X.numel(), 1)", "empty", "take 0 for the mean of nothing"),
    Row("normalize(X, ...)", "", "F.normalize(X, ..., eps=EPS)", "", _EPS_WORDS),
    Row("ctc_loss(A, B, ...)", "", "F.ctc_loss(A, B, ..., zero_infinity=True)", "", TOO_SHORT),
    Row("svd(X, ...)", "X", "X + torch.eye(*X.shape[-2:]).to(X) * torch.linspace(0, 1e-4, X.shape[-1]).to(X)", "", "move equal singular values apart, whose gradient is infinite"),
)  # fmt: skip
STABLE = tuple((pattern, form) for patterns, form in _STABLE for pattern in patterns.split(" | "))
GUARDS = tuple(
    row._replace(pattern=pattern, form=form)
    for row in _ROWS
    for form in row.form.split(" | ")
    for pattern in row.pattern.split(" | ")
)

# fmt: off
FORMATS = "float16", "bfloat16", "float32", "float64"  # the narrowest first
NUMBERS = {
    # Large enough for the inverse, and the inverse of the square, to stay in the format; small against healthy values.
    "EPS": ("1e-4", "1e-8", "1e-8", "1e-12"),
    "TINY": ("1e-4", "1e-12", "1e-12", "1e-24"),
    # The distance from 1 at which a derivative with a pole there is of moderate size.
    "NEAR": ("1e-3", "1e-2", "1e-6", "1e-9"),
    # The floor of a divisor whose quotients, and their gradients, a training survives.
    "MILD": ("1e-2", "1e-3", "1e-3", "1e-3"),
    # A training survives steps by the gradient of the exponential of CALM, and of its inverse. That of SAFE leaves room
    # for what follows. That of MOST is near the end of the format.
    "CALM": ("3", "5", "5", "5"),
    "SAFE": ("5", "20", "20", "40"),
    "MOST": ("10", "80", "80", "700"),
    # A score and a second mask can be added to it.
    "LOWEST": ("-3e4", "-1e30", "-1e30", "-1e30"),
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
