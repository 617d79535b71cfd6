"""Losses and likelihoods written by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from programs.case import Setup, failure, sequence


class Scored(nn.Module):
    """A linear layer and a loss on what it gives."""

    def __init__(self, width: int, outputs: int, loss: nn.Module) -> None:
        super().__init__()
        self.head = nn.Linear(width, outputs)
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.head(x), target)


class ExponentialLoss(nn.Module):
    """The loss of AdaBoost."""

    def forward(self, score: Tensor, target: Tensor) -> Tensor:
        margin = score.squeeze(-1) * target
        return torch.exp(-margin).mean()  # culprit: exponential_loss


@failure("exp of a large margin in a loss of one's own", module="loss", value="inf", operations="exp")
def exponential_loss() -> Setup:
    model = Scored(8, 1, ExponentialLoss())
    x, target = torch.randn(64, 8) * 500, torch.randint(0, 2, (64,)) * 2.0 - 1
    return Setup(model, (x, target))


class LogSumExpLoss(nn.Module):
    """Cross entropy by hand."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        partition = torch.log(torch.exp(logits).sum(dim=-1))  # culprit: logsumexp
        return (partition - logits.gather(-1, target[:, None]).squeeze(-1)).mean()


@failure("log-sum-exp by hand, without the maximum taken out", module="loss", value="inf", operations="exp")
def logsumexp() -> Setup:
    model = Scored(8, 10, LogSumExpLoss())
    return Setup(model, (torch.randn(4, 8) * 300, torch.tensor([1, 2, 3, 4])))


class Diffusion(nn.Module):
    """Noisy samples back to clean ones by the product of 1 / (1 - beta)."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.register_buffer("beta", torch.linspace(1e-4, 0.2, steps))
        self.denoise = nn.Linear(8, 8)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        gain = torch.cumprod(1 / (1 - self.beta), dim=0)  # culprit: cumprod
        return self.denoise(x * gain[step][:, None])


@failure(
    "a cumulative product over a thousand steps",
    module="denoise",
    label="input[0]",
    origin="received",
    source_module="",
    value="inf",
    operations="cumprod",
)
def cumprod() -> Setup:
    return Setup(Diffusion(1000), (torch.randn(2, 8), torch.tensor([10, 990])))


class MarginLoss(nn.Module):
    """The mean over the pairs that violate the margin."""

    def forward(self, score: Tensor, target: Tensor) -> Tensor:
        gap = 1 - score.squeeze(-1) * target
        return gap[gap > 0].mean()  # culprit: empty_selection


@failure("the mean over a selection that is empty", module="loss", operations="mean")
def empty_selection() -> Setup:
    model = Scored(8, 1, MarginLoss())
    nn.init.constant_(model.head.bias, 100.0)
    return Setup(model, (torch.randn(6, 8), torch.ones(6)))


class BinaryCrossEntropy(nn.Module):
    """-y log(p) - (1 - y) log(1 - p)."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        p = torch.sigmoid(logits.squeeze(-1))
        positive = target * torch.log(p)
        negative = (1 - target) * torch.log(1 - p)  # culprit: binary_cross_entropy
        return -(positive + negative).mean()


@failure("binary cross entropy by hand of a probability of 1: 0 × log(0)", module="loss", operations="log")
def binary_cross_entropy() -> Setup:
    model = Scored(8, 1, BinaryCrossEntropy())
    nn.init.constant_(model.head.bias, 40.0)
    return Setup(model, (torch.randn(6, 8), torch.ones(6)))


class Divergence(nn.Module):
    """KL(target ‖ model) by hand."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        log_target = target.log()  # culprit: kl_of_zero
        return (target * (log_target - logits.log_softmax(-1))).sum(-1).mean()


@failure("KL divergence by hand of a target with a zero: 0 × log(0)", module="loss", operations="log")
def kl_of_zero() -> Setup:
    target = torch.tensor([[0.7, 0.3, 0.0], [0.2, 0.2, 0.6]])
    return Setup(Scored(8, 3, Divergence()), (torch.randn(2, 8), target))


class Entropy(nn.Module):
    """The entropy of the policy, as a bonus."""

    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        p = logits.softmax(-1)
        return -(p * p.log()).sum(-1).mean()  # culprit: entropy_bonus


@failure("the entropy of a softmax that underflowed to 0", module="loss", operations="log")
def entropy_bonus() -> Setup:
    model = Scored(8, 3, Entropy())
    with torch.no_grad():
        model.head.bias[0] = 200.0
    return Setup(model, (torch.randn(2, 8), torch.zeros(2)))


class BetaLikelihood(nn.Module):
    """The log density of a beta distribution whose parameters are relus."""

    def forward(self, parameters: Tensor, target: Tensor) -> Tensor:
        a, b = torch.relu(parameters).unbind(-1)
        constant = torch.lgamma(a) + torch.lgamma(b)  # culprit: lgamma_of_zero
        shape = (a - 1) * target.log() + (b - 1) * (1 - target).log()
        return (constant - torch.lgamma(a + b) - shape).mean()


@failure(
    "lgamma of a parameter that a relu made 0",
    module="loss",
    value="inf",
    operations="lgamma",
)
def lgamma_of_zero() -> Setup:
    model = Scored(8, 2, BetaLikelihood())
    with torch.no_grad():
        model.head.bias[1] = 9.0
    return Setup(model, (torch.randn(6, 8), torch.rand(6).clamp(0.1, 0.9)))


class FastSoftmax(torch.autograd.Function):
    """A softmax whose backward keeps only its result."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        weight = torch.exp(x)  # culprit: custom_function
        y = weight / weight.sum(dim=-1, keepdim=True)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return y * (grad - (grad * y).sum(dim=-1, keepdim=True))


class Mixture(nn.Module):
    """Weights of a mixture by the fast softmax."""

    def forward(self, logits: Tensor) -> Tensor:
        return FastSoftmax.apply(logits)


@failure("a torch.autograd.Function whose forward overflows", module="mixture", operations="exp")
def custom_function() -> Setup:
    model = sequence(head=nn.Linear(8, 4), mixture=Mixture())
    return Setup(model, (torch.randn(4, 8) * 400,))


class SignedSqrt(torch.autograd.Function):
    """sign(x) sqrt(|x|), as bilinear pooling has it."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        root = x.abs().sqrt()
        y = x / root  # culprit: signed_sqrt
        ctx.save_for_backward(root)
        return y

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        return grad / (2 * root)


class BilinearPool(nn.Module):
    """Products of features, pooled, then their signed roots."""

    def forward(self, h: Tensor) -> Tensor:
        return SignedSqrt.apply(h.square().mean(1))


@failure("a torch.autograd.Function that divides by its own root at 0", module="pool", operations="div")
def signed_sqrt() -> Setup:
    model = sequence(features=nn.Sequential(nn.Linear(8, 6), nn.ReLU()), pool=BilinearPool())
    with torch.no_grad():
        model.features[0].bias[2] = -100.0  # a dead channel
    return Setup(model, (torch.randn(3, 5, 8),))
