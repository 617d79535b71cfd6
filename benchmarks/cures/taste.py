"""Small failing models for which a reviewer of the field would want one form, and the value that it must have.

Each is a module of a few lines in the idiom of public code, one batch with which it fails, and the value of its result
in float64, by a formula of our own. A case is held back from tuning where the checksum of its name is odd.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

_SOURCE = """\
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
{imports}


class Part(nn.Module):
    {method}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones((), dtype={dtype}))
        self.part = Part()

    def forward(self, x, *others):
        return {call}


def make() -> nn.Module:
    return Model()


def batch(seed: int = 0):
    torch.manual_seed(seed)
    return ({batch},)


def loss(output: Tensor) -> Tensor:
    return output.float().sum()
"""


@dataclass(frozen=True)
class Taste:
    """One failing model.

    `method` is the code of its module. `batch` are the arguments, as source. `truth` is the value of the module's
    result, as source over the arguments in float64, by the names of `forward`'s parameters; nan where float64 has none
    either. `accepts` are parts of lines that a reviewer accepts: one of them has to be in the new line, and none of
    `rejects`. `given`: no gradient is asked of the first argument.
    """

    name: str
    method: str
    batch: str
    truth: str
    accepts: tuple[str, ...]
    rejects: tuple[str, ...] = ("clamp", "nan_to_num", "masked_fill")
    imports: str = ""
    dtype: str = "torch.float32"
    given: bool = False

    @property
    def is_held(self) -> bool:
        """Return whether the case is held back from tuning."""
        return zlib.crc32(self.name.encode()) % 2 == 1

    def source(self) -> str:
        """Return the program."""
        method = "\n    ".join(self.method.strip("\n").splitlines())
        # The weight is 1. Where the module is given no gradient, it stands behind it.
        call = "self.weight * self.part(x, *others)" if self.given else "self.part(self.weight * x, *others)"
        return _SOURCE.format(
            imports=self.imports, method=method, dtype=self.dtype, call=call, batch=self.batch
        )


TASTES = [
    Taste(
        "softplus_inverse",
        "def forward(self, x):\n    return torch.log(torch.exp(x) - 1)",
        "torch.tensor([0.5, 30.0, 120.0])",
        "x + torch.log(-torch.expm1(-x))",
        ("torch.expm1(-x)",),
    ),
    Taste(
        "inverse_softplus_of_scale",
        "def forward(self, scale):\n    raw = scale.expm1()\n    return raw.log()",
        "torch.tensor([0.1, 2.0, 400.0])",
        "scale + torch.log(-torch.expm1(-scale))",
        ("torch.expm1(-scale)",),
    ),
    Taste(
        "softplus_inverse_two_lines",
        "def forward(self, y):\n    e = torch.exp(y)\n    return (e - 1).log()",
        "torch.tensor([0.5, 3.0, 100.0])",
        "y + torch.log(-torch.expm1(-y))",
        ("torch.expm1(-y)",),
    ),
    Taste(
        "gaussian_log_volume",
        "def forward(self, cov):\n    return 0.5 * torch.log(torch.det(cov))",
        "torch.stack([torch.eye(60) * 1e-2, torch.eye(60)])",
        "0.5 * torch.linalg.slogdet(cov)[1]",
        ("logdet", "slogdet"),
    ),
    Taste(
        "flow_jacobian",
        "def forward(self, w):\n    return torch.log(torch.abs(torch.linalg.det(w)))",
        "torch.stack([-torch.eye(31) * 1e-2, torch.eye(31)])",
        "torch.linalg.slogdet(w)[1]",
        ("slogdet",),
    ),
    Taste(
        "free_energy",
        "def forward(self, logits, t):\n    return -t * torch.log(torch.sum(torch.exp(logits / t), dim=1))",
        "torch.tensor([[200.0, 1.0], [2.0, 1.0]]), torch.tensor(1.0)",
        "-t * torch.logsumexp(logits / t, 1)",
        ("torch.logsumexp(logits / t, dim=1)",),
    ),
    Taste(
        "importance_bound",
        "def forward(self, log_w):\n    w = log_w.exp()\n    return torch.log(w.mean(dim=0)).mean()",
        "torch.tensor([[-200.0, 1.0], [-210.0, 2.0]])",
        "(torch.logsumexp(log_w, 0) - math.log(2)).mean()",
        ("torch.logsumexp(log_w, dim=0)",),
    ),
    Taste(
        "two_terms",
        "def forward(self, a, b):\n    return (torch.exp(a) + torch.exp(b)).log()",
        "torch.tensor([100.0, 1.0]), torch.tensor([99.0, 2.0])",
        "torch.logaddexp(a, b)",
        ("torch.logaddexp(a, b)",),
    ),
    Taste(
        "nll_of_picked",
        "def forward(self, logits, y):\n    p = F.softmax(logits, dim=-1)\n"
        "    return -torch.log(p[torch.arange(len(y)), y]).mean()",
        "torch.tensor([[0.0, 300.0], [1.0, 2.0]]), torch.tensor([0, 1])",
        "F.cross_entropy(logits, y)",
        ("log_softmax(logits, dim=-1)[torch.arange(len(y)), y]", "cross_entropy(logits, y"),
    ),
    Taste(
        "nll_by_gather",
        "def forward(self, scores, y):\n    prob = torch.softmax(scores, 1)\n"
        "    return -prob.gather(1, y[:, None]).log().squeeze(1)",
        "torch.tensor([[0.0, 300.0], [1.0, 2.0]]), torch.tensor([0, 1])",
        'F.cross_entropy(scores, y, reduction="none")',
        ("log_softmax(scores, 1).gather(1, y[:, None])", "cross_entropy("),
    ),
    Taste(
        "bce_of_sigmoid",
        "def forward(self, x, y):\n    p = torch.sigmoid(x)\n"
        "    return -(y * torch.log(p) + (1 - y) * torch.log(1 - p)).mean()",
        "torch.tensor([-200.0, 200.0, 1.0]), torch.tensor([1.0, 0.0, 1.0])",
        "F.binary_cross_entropy_with_logits(x, y)",
        ("binary_cross_entropy_with_logits(x, y", "logsigmoid(x) + (1 - y) * F.logsigmoid(-x)"),
    ),
    Taste(
        "bce_of_probabilities",
        "def forward(self, p, y):\n    return -(y * p.log() + (1 - y) * (1 - p).log())",
        "torch.tensor([0.0, 1.0, 0.25]), torch.tensor([0.0, 1.0, 1.0])",
        "torch.where(p == y, 0.0, -p.log())",
        ("F.binary_cross_entropy(p, y",),
    ),
    Taste(
        "sigmoid_by_hand",
        "def forward(self, x):\n    return 1 / (1 + torch.exp(-x))",
        "torch.tensor([-100.0, 0.0, 3.0])",
        "torch.sigmoid(x)",
        ("torch.sigmoid(x)",),
    ),
    Taste(
        "gate_by_hand",
        "def forward(self, x):\n    return x / (1.0 + (-x).exp())",
        "torch.tensor([-100.0, 0.0, 3.0])",
        "x * torch.sigmoid(x)",
        ("F.silu(x)", "x * torch.sigmoid(x)"),
    ),
    Taste(
        "tanh_by_hand",
        "def forward(self, u):\n    return (torch.exp(u) - torch.exp(-u)) / (torch.exp(u) + torch.exp(-u))",
        "torch.tensor([100.0, 0.5, -0.5])",
        "torch.tanh(u)",
        ("torch.tanh(u)",),
    ),
    Taste(
        "attention_by_hand",
        "def forward(self, s):\n    return s.exp() / s.exp().sum(dim=-1, keepdim=True)",
        "torch.tensor([[100.0, 99.0], [1.0, 2.0]])",
        "torch.softmax(s, -1)",
        ("torch.softmax(s, dim=-1)", "s.softmax(dim=-1)"),
    ),
    Taste(
        "unit_vectors",
        "def forward(self, v):\n    return v / v.norm(dim=-1, keepdim=True)",
        "torch.tensor([[0.0, 0.0], [3.0, 4.0]])",
        "v / v.norm(dim=-1, keepdim=True)",
        ("F.normalize(v, dim=-1)",),
    ),
    Taste(
        "unit_by_rsqrt",
        "def forward(self, v):\n    return v * torch.rsqrt((v**2).sum(1, keepdim=True))",
        "torch.tensor([[0.0, 0.0], [3.0, 4.0]])",
        "v / v.norm(dim=-1, keepdim=True)",
        ("F.normalize(v, dim=1)", "F.normalize(v)"),
    ),
    Taste(
        "cosine_of_pairs",
        "def forward(self, a, b):\n    return (a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))",
        "torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([[1.0, 2.0], [1.0, 0.0]])",
        "(a * b).sum(-1) / (a.norm(dim=-1) * b.norm(dim=-1))",
        ("F.cosine_similarity(a, b, dim=-1)",),
    ),
    Taste(
        "cosine_matrix",
        "def forward(self, a, b):\n"
        "    return (a @ b.T) / (a.norm(dim=-1, keepdim=True) * b.norm(dim=-1, keepdim=True).T)",
        "torch.tensor([[0.0, 0.0], [3.0, 4.0]]), torch.tensor([[1.0, 2.0], [1.0, 0.0]])",
        "(a @ b.T) / (a.norm(dim=-1, keepdim=True) * b.norm(dim=-1, keepdim=True).T)",
        ("F.normalize(a, dim=-1) @ F.normalize(b, dim=-1).T",),
    ),
    Taste(
        "distance_gradient",
        "def forward(self, a, b):\n    return ((a - b) ** 2).sum(-1).sqrt()",
        "torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, 2.0], [0.0, 0.0]])",
        "(a - b).norm(dim=-1)",
        ("torch.linalg.vector_norm(a - b, dim=-1)", "(a - b).norm(dim=-1)", "pairwise_distance"),
    ),
    Taste(
        "distillation_targets",
        "def forward(self, t, logq):\n    return (t * (torch.log(t) - logq)).sum(-1)",
        "torch.tensor([[0.0, 1.0], [0.5, 0.5]]), torch.tensor([[-1.0, -0.5], [-0.5, -1.0]])",
        "(torch.xlogy(t, t) - t * logq).sum(-1)",
        ("torch.xlogy(t, t) - t * logq", "kl_div(logq, t"),
        given=True,
    ),
    Taste(
        "entropy_of_labels",
        "def forward(self, p):\n    return -torch.sum(p * torch.log2(p), dim=-1)",
        "torch.tensor([[0.0, 1.0], [0.5, 0.5]])",
        "-(torch.xlogy(p, p) / math.log(2)).sum(-1)",
        ("torch.xlogy(p, p)", "torch.special.entr(p)"),
        given=True,
    ),
    Taste(
        "band_limited",
        "def forward(self, x):\n    return torch.sin(math.pi * x) / (math.pi * x)",
        "torch.tensor([0.0, 0.25, 2.5])",
        "torch.sinc(x)",
        ("torch.sinc(x)",),
    ),
    Taste(
        "spherical_bessel",
        "def forward(self, r):\n    return r.sin() / r",
        "torch.tensor([0.0, 0.25, 2.5])",
        "torch.sinc(r / math.pi)",
        ("torch.sinc(r / math.pi)", "torch.special.spherical_bessel_j0(r)"),
    ),
    Taste(
        "magnitude",
        "def forward(self, re, im):\n    return torch.sqrt(re**2 + im**2)",
        "torch.tensor([3e25, 3.0]), torch.tensor([4e25, 4.0])",
        "torch.hypot(re, im)",
        ("torch.hypot(re, im)",),
    ),
    Taste(
        "planck",
        "def forward(self, x):\n    return x**3 / (torch.exp(x) - 1)",
        "torch.tensor([1e-9, 0.5, 4.0])",
        "x**3 / torch.expm1(x)",
        ("torch.expm1(x)",),
    ),
    Taste(
        "compound_rate",
        "def forward(self, r):\n    return math.log(2) / torch.log(1 + r)",
        "torch.tensor([1e-9, 0.05, 0.2])",
        "math.log(2) / torch.log1p(r)",
        ("torch.log1p(r)",),
    ),
    Taste(
        "survival",
        "def forward(self, h):\n    return torch.log(1 - torch.exp(-h))",
        "torch.tensor([1e-9, 0.05, 2.0])",
        "torch.log(-torch.expm1(-h))",
        ("torch.log(-torch.expm1(-h))",),
    ),
    Taste(
        "deviation_of_moments",
        "def forward(self, x):\n    return torch.sqrt((x**2).mean(-1) - x.mean(-1) ** 2)",
        "torch.tensor([[10000.1, 10000.2, 10000.3], [1.0, 2.0, 4.0]])",
        "x.var(-1, unbiased=False).sqrt()",
        ("x.std(-1, unbiased=False)", "x.var(-1, unbiased=False)", "correction=0"),
    ),
    Taste(
        "von_mises",
        "def forward(self, k, cos):\n    return k * cos - torch.log(2 * math.pi * torch.special.i0(k))",
        "torch.tensor([200.0, 2.0]), torch.tensor([0.9, 0.1])",
        "k * cos - (math.log(2 * math.pi) + k + torch.log(torch.special.i0e(k)))",
        ("torch.special.i0e(k)",),
    ),
    Taste(
        "censored_gaussian",
        "def forward(self, z):\n    return torch.log(0.5 * (1 + torch.erf(z / math.sqrt(2))))",
        "torch.tensor([-12.0, -1.0, 1.0])",
        "torch.special.log_ndtr(z)",
        ("torch.special.log_ndtr(z)",),
    ),
    Taste(
        "tail_probability",
        "def forward(self, x):\n    return torch.log(torch.special.erfc(x))",
        "torch.tensor([14.0, 0.1, 1.0])",
        "torch.log(torch.special.erfcx(x)) - x**2",
        ("erfcx(x)", "torch.special.log_ndtr("),
    ),
    Taste(
        "hyperbolic_depth",
        "def forward(self, x):\n    return torch.log(x + torch.sqrt(x**2 + 1))",
        "torch.tensor([-1e5, 0.5, 3.0])",
        "torch.asinh(x)",
        ("torch.asinh(x)",),
    ),
    Taste(
        "joint_probability",
        "def forward(self, p):\n    return torch.log(torch.prod(p, dim=-1))",
        "torch.full((2, 40), 1e-2)",
        "p.log().sum(-1)",
        (".log().sum(dim=-1)", "torch.log(p).sum(dim=-1)"),
    ),
    Taste(
        "policy_ratio",
        "def forward(self, new, old):\n    return torch.exp(new) / torch.exp(old)",
        "torch.tensor([-120.0, -1.0]), torch.tensor([-121.0, -2.0])",
        "torch.exp(new - old)",
        ("torch.exp(new - old)",),
    ),
    Taste(
        "mixture_density",
        "def forward(self, log_p, pi):\n    return torch.log((pi * torch.exp(log_p)).sum(-1))",
        "torch.tensor([[-300.0, -310.0], [-1.0, -2.0]]), torch.tensor([0.25, 0.75])",
        "torch.logsumexp(log_p + pi.log(), -1)",
        ("torch.logsumexp(",),
    ),
    Taste(
        "scaled_scores",
        "def forward(self, q, k):\n    return (q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])).float()",
        "torch.full((1, 2, 64), 40.0).half(), torch.full((1, 2, 64), 40.0).half()",
        "q @ k.transpose(-2, -1) / 8",
        ("(q / math.sqrt(q.shape[-1])) @ k.transpose(-2, -1)",),
        dtype="torch.float16",
    ),
    Taste(
        "logistic_density",
        "def forward(self, z):\n    return torch.exp(-z) / (1 + torch.exp(-z)) ** 2",
        "torch.tensor([-100.0, 0.0, 3.0])",
        "torch.sigmoid(z) * torch.sigmoid(-z)",
        ("torch.sigmoid(z) * torch.sigmoid(-z)", "torch.sigmoid(-z) * torch.sigmoid(z)"),
    ),
    Taste(
        "average_in_half",
        "def forward(self, x):\n    return x.sum(-1) / x.shape[-1]",
        "torch.full((2, 512), 200.0).half()",
        "x.mean(-1)",
        ("x.mean(-1)",),
        dtype="torch.float16",
    ),
    Taste(
        "deviation_of_log_variance",
        "def forward(self, logvar):\n    return torch.sqrt(torch.exp(logvar))",
        "torch.tensor([100.0, -1.0])",
        "torch.exp(0.5 * logvar)",
        ("torch.exp(0.5 * logvar)", "torch.exp(logvar / 2)"),
    ),
    Taste(
        "power_in_a_logarithm",
        "def forward(self, x):\n    return torch.log(x**20)",
        "torch.tensor([1e3, 2.0])",
        "20 * x.log()",
        ("20 * torch.log(x)",),
    ),
    Taste(
        "hinge_of_margin",
        "def forward(self, s, y):\n    return torch.log(1 + torch.exp(-y * s)).mean()",
        "torch.tensor([-200.0, 1.0]), torch.tensor([1.0, 1.0])",
        "F.softplus(-y * s).mean()",
        ("F.softplus(-y * s)", "F.softplus(-(y * s))"),
    ),
    Taste(
        "difference_of_exponentials",
        "def forward(self, a, b):\n    return torch.log(torch.exp(a) - torch.exp(b))",
        "torch.tensor([100.0, 2.0]), torch.tensor([99.0, 1.0])",
        "a + torch.log(-torch.expm1(b - a))",
        ("torch.expm1(b - a)",),
    ),
    # Names: which are counts, and which arguments exist.
    Taste(
        "ratio_by_numerator",
        "def forward(self, gain, numerator):\n    return gain / numerator",
        "torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, -2.5, 1.5])",
        "gain / numerator",
        ("torch.where(numerator.abs() <", "numerator.masked_fill(numerator == 0"),
        rejects=("numerator.clamp",),
    ),
    Taste(
        "returns_by_discount",
        "def forward(self, gain, discount):\n    return gain / discount",
        "torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.0, 1.0])",
        "gain / discount",
        ("discount.abs() <", "discount.masked_fill(", "discount.clamp(min=1e"),
        rejects=("clamp(min=1)",),
    ),
    Taste(
        "mean_over_tokens",
        "def forward(self, total, num_tokens):\n    return total / num_tokens",
        "torch.tensor([0.0, 2.0, 3.0]), torch.tensor([0, 4, 5])",
        "total / num_tokens",
        ("num_tokens.clamp(min=1)",),
        rejects=(),
    ),
    Taste(
        "all_labels_ignored",
        "def forward(self, x, y):\n    return cross_entropy(x, y)",
        "torch.randn(2, 3), torch.full((2,), -100)",
        "torch.tensor(0.0)",
        ("(y != -100).any()",),
        rejects=("cross_entropy.ignore_index",),
        imports="from torch.nn.functional import cross_entropy",
    ),
    # Edges: where the line stands.
    Taste(
        "two_statements",
        "def forward(self, x):\n    y = 2 * x; return torch.log(1 + torch.exp(y))",
        "torch.tensor([100.0, 1.0])",
        "F.softplus(2 * x)",
        ("y = 2 * x; return F.softplus(y)",),
    ),
    Taste(
        "two_lambdas",
        "inner, outer = (lambda self, t: t.tanh()), (lambda self, t: torch.log(torch.sigmoid(t)))\n\n"
        "def forward(self, x):\n    return self.outer(x) + self.inner(x)",
        "torch.tensor([-200.0, 1.0])",
        "F.logsigmoid(x) + x.tanh()",
        ("(lambda self, t: F.logsigmoid(t))",),
    ),
]
