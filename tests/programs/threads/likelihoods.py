"""Likelihoods, flows, policies and spectra."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from programs.case import loss_by, thread
from programs.threads import encoder, zero_head


def log_likelihood(energies: Tensor) -> Tensor:
    return torch.log(torch.exp(energies).sum(-1))  # culprit: capsule_likelihood


@thread("mlberkeley/scae-pytorch/pull/4")
def capsule_likelihood():
    return encoder(gain=200.0), (torch.randn(3, 6),), lambda model, x: log_likelihood(model(x)).mean()


@thread("pytorch/pytorch/pull/3336")
def poisson_counts():
    class PoissonLoss(nn.Module):
        def forward(self, rate: Tensor, counts: Tensor) -> Tensor:
            return (rate - counts * torch.log(rate)).mean()  # culprit: poisson_counts

    counts = torch.tensor([[0.0, 1.0, 2.0, 0.0]]).expand(3, 4).clone()
    return zero_head(), (torch.randn(3, 6), counts), loss_by(PoissonLoss())


class Club(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.logvar = encoder(), encoder(gain=900.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mu, logvar = self.mean(x), self.logvar(x)
        return (-((mu - y) ** 2) / logvar.exp() - logvar).sum(1).mean()  # culprit: mutual_information


@thread("Linear95/CLUB/issues/27")
def mutual_information():
    return Club(), (torch.randn(4, 6), torch.randn(4, 4)), lambda model, x, y: -model(x, y)


class MixtureDensity(nn.Module):
    def __init__(self, components: int = 3) -> None:
        super().__init__()
        self.weight, self.mu, self.log_sigma = (nn.Linear(6, components) for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        sigma = self.log_sigma(x).exp()
        density = torch.exp(-((y - self.mu(x)) ** 2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
        return -torch.log((self.weight(x).softmax(-1) * density).sum(-1)).mean()  # culprit: mixture_density


@thread("keras-team/keras/issues/1061")
def mixture_density():
    return MixtureDensity(), (torch.randn(4, 6), torch.full((4, 1), 60.0)), lambda model, x, y: model(x, y)


@thread("keras-team/keras/issues/2586")
def beta_mixture():
    def beta_log_prob(alpha: Tensor, beta: Tensor, y: Tensor) -> Tensor:
        norm = torch.lgamma(alpha + beta) - torch.lgamma(alpha) - torch.lgamma(beta)
        return norm + (alpha - 1) * torch.log(y) + (beta - 1) * torch.log(1 - y)  # culprit: beta_mixture

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        alpha, beta = F.softplus(model(x)).unbind(-1)
        return -beta_log_prob(alpha, beta, y).mean()

    return encoder(outputs=2), (torch.randn(3, 6), torch.tensor([0.2, 1.0, 0.7])), loss


class GaussianPolicy(nn.Module):
    def __init__(self, max_action: float = 2.0) -> None:
        super().__init__()
        self.mu, self.sigma, self.max_action = nn.Linear(6, 2), nn.Linear(6, 2), max_action
        self.reparam_noise = 1e-6

    def forward(self, state: Tensor) -> tuple[Tensor, Tensor]:
        distribution = torch.distributions.Normal(self.mu(state), self.sigma(state).clamp(1e-6, 1))
        actions = distribution.rsample()
        action = torch.tanh(actions) * self.max_action
        log_probs = distribution.log_prob(actions)
        log_probs = log_probs - torch.log(1 - action.pow(2) + self.reparam_noise)  # culprit: squashed_policy
        return action, log_probs.sum(1, keepdim=True)


@thread("philtabor/Actor-Critic-Methods-Paper-To-Code/issues/7")
def squashed_policy():
    def loss(model: nn.Module, state: Tensor) -> Tensor:
        action, log_probs = model(state)
        return (0.2 * log_probs - action.sum(1, keepdim=True)).mean()

    return GaussianPolicy(), (torch.randn(4, 6) * 5,), loss


@thread("huggingface/trl/pull/6550")
def reference_divergence():
    def loss(model: nn.Module, x: Tensor, reference: Tensor) -> Tensor:
        log_probs = F.log_softmax(model(x), -1)[:, 0]
        difference = reference - log_probs
        per_token_kl = torch.exp(difference) - difference - 1  # culprit: reference_divergence
        return per_token_kl.mean()

    return encoder(gain=700.0), (torch.randn(4, 6), -torch.rand(4)), loss


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = encoder(2, 2, gain=900.0), encoder(2, 2)

    def forward(self, z: Tensor) -> Tensor:
        kept, changed = z.chunk(2, -1)
        scale = torch.sigmoid(self.scale(kept) + 2.0)
        changed = changed / scale - self.shift(kept)  # culprit: flow_reverse
        return torch.cat([kept, changed], -1)


@thread("andreas128/SRFlow/issues/2")
def flow_reverse():
    flow = nn.Sequential(Coupling(), Coupling())
    return flow, (torch.randn(4, 4),), lambda model, z: model(z).abs().mean()


@thread("pkuxmq/Invertible-Image-Rescaling/issues/37")
def jacobian_determinant():
    class Mixing(nn.Module):
        def __init__(self, width: int = 16) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(width) * 1e-3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            log_det = torch.log(torch.abs(torch.det(self.weight)))  # culprit: jacobian_determinant
            return x @ self.weight, log_det

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        z, log_det = model(x)
        return z.pow(2).mean() - log_det

    return Mixing(), (torch.randn(4, 16),), loss


def soft_group(distance: Tensor, threshold: float = 1.0, tau: float = 0.01) -> Tensor:
    return 1 / (1 + ((distance - threshold) / tau).exp())  # culprit: group_assignment


@thread("InhwanBae/GPGraph/issues/2")
def group_assignment():
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        points = model(x)
        distance = torch.cdist(points, points + 0.5)
        return soft_group(distance).mean()

    return encoder(gain=6.0), (torch.randn(4, 6),), loss


@thread("pytorch/pytorch/issues/17455")
def softplus_by_hand():
    class Positive(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(torch.exp(x) + 1)  # culprit: softplus_by_hand

    net = nn.Sequential(encoder(gain=200.0), Positive(), nn.Linear(4, 1))
    return net, (torch.randn(4, 6),), lambda model, x: model(x).pow(2).mean()


@thread("pytorch/pytorch/issues/68425")
def exponential_unit():
    class Unit(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(x <= 0, torch.exp(x), 1 + x)  # culprit: exponential_unit

    net = nn.Sequential(encoder(gain=300.0), Unit())
    return net, (torch.randn(4, 6),), lambda model, x: model(x).mean()


@thread("OmicsML/dance/issues/166")
def gene_counts():
    def negative_binomial(mu: Tensor, theta: Tensor, counts: Tensor) -> Tensor:
        log_mix = torch.log(theta + mu)
        return (
            theta * (torch.log(theta) - log_mix)  # culprit: gene_counts
            + counts * (torch.log(mu + 1e-8) - log_mix)
            + torch.lgamma(counts + theta + 1)
        )

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mu, self.theta = nn.Sequential(encoder(), nn.Softplus()), zero_head()

        def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
            return self.mu(z), self.theta(z)

    batch = torch.randn(3, 6), torch.randint(0, 3, (3, 4)).float()
    return Decoder(), batch, lambda model, z, counts: -negative_binomial(*model(z), counts).mean()


@thread("speechbrain/speechbrain/issues/181")
def compressed_spectrum():
    def compress(wave: Tensor, power: float = 0.5) -> Tensor:
        spectrum = torch.stft(wave, 16, window=torch.ones(16, dtype=wave.dtype), return_complex=True)
        return torch.view_as_real(spectrum).pow(2).sum(-1).pow(power)  # culprit: compressed_spectrum

    net, waves = nn.Linear(64, 64, bias=False), torch.stack([torch.randn(64), torch.zeros(64)])
    batch = waves, torch.randn(2, 64)
    return net, batch, lambda model, x, y: F.l1_loss(compress(model(x)), compress(y))


@thread("csteinmetz1/auraloss/issues/25")
def silent_target():
    def si_sdr(estimate: Tensor, target: Tensor, eps: float = 1e-8) -> Tensor:
        alpha = (estimate * target).sum(-1) / (target**2).sum(-1)  # culprit: silent_target
        scaled = target * alpha.unsqueeze(-1)
        ratio = (scaled**2).sum(-1) / (((estimate - scaled) ** 2).sum(-1) + eps)
        return -10 * torch.log10(ratio + eps).mean()

    target = torch.randn(3, 8)
    target[1] = 0
    return nn.Linear(8, 8), (torch.randn(3, 8), target), loss_by(si_sdr)


@thread("PeterPonyu/aether-3d/issues/134")
def transport_kernel():
    def sinkhorn(cost: Tensor, a: Tensor, b: Tensor, reg: float = 0.01, steps: int = 5) -> Tensor:
        kernel = torch.exp(-cost / reg)
        v = torch.ones_like(b)
        for _ in range(steps):
            u = a / (kernel @ v)  # culprit: transport_kernel
            v = b / (kernel.T @ u)
        return (u[:, None] * kernel * v[None] * cost).sum()

    def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        cost = torch.cdist(model(x), y).pow(2)
        weights = torch.full((4,), 0.25, dtype=cost.dtype)
        return sinkhorn(cost, weights, weights)

    return encoder(), (torch.randn(4, 6), torch.randn(4, 4) + 5), loss
