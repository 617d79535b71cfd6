"""Likelihoods, flows, policies and spectra."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from programs.case import thread
from programs.threads import encoder, zero_head

BASE = "https://github.com/"


class Club(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean, self.logvar = encoder(), encoder(gain=900.0)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mu, logvar = self.mean(x), self.logvar(x)
        return (-((mu - y) ** 2) / logvar.exp() - logvar).sum(1).mean()  # culprit: mutual_information


@thread(BASE + "Linear95/CLUB/issues/27")
def mutual_information():
    return Club(), (torch.randn(4, 6), torch.randn(4, 4)), lambda model, x, y: -model(x, y)


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


@thread(BASE + "philtabor/Actor-Critic-Methods-Paper-To-Code/issues/7")
def squashed_policy():
    def loss(model: nn.Module, state: Tensor) -> Tensor:
        action, log_probs = model(state)
        return (0.2 * log_probs - action.sum(1, keepdim=True)).mean()

    return GaussianPolicy(), (torch.randn(4, 6) * 5,), loss


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = encoder(2, 2, gain=900.0), encoder(2, 2)

    def forward(self, z: Tensor) -> Tensor:
        kept, changed = z.chunk(2, -1)
        scale = torch.sigmoid(self.scale(kept) + 2.0)
        changed = changed / scale - self.shift(kept)  # culprit: flow_reverse
        return torch.cat([kept, changed], -1)


@thread(BASE + "andreas128/SRFlow/issues/2")
def flow_reverse():
    flow = nn.Sequential(Coupling(), Coupling())
    return flow, (torch.randn(4, 4),), lambda model, z: model(z).abs().mean()


@thread(BASE + "pytorch/pytorch/issues/17455")
def softplus_by_hand():
    class Positive(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.log(torch.exp(x) + 1)  # culprit: softplus_by_hand

    net = nn.Sequential(encoder(gain=200.0), Positive(), nn.Linear(4, 1))
    return net, (torch.randn(4, 6),), lambda model, x: model(x).pow(2).mean()


@thread(BASE + "OmicsML/dance/issues/166")
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

    def loss(model: nn.Module, z: Tensor, counts: Tensor) -> Tensor:
        return -negative_binomial(*model(z), counts).mean()

    return Decoder(), (torch.randn(3, 6), torch.randint(0, 3, (3, 4)).float()), loss


@thread(BASE + "ENSTA-U2IS-AI/LDU/issues/7")
def invalid_depth():
    class Silog(nn.Module):
        def forward(self, depth_est: Tensor, depth_gt: Tensor, mask: Tensor) -> Tensor:
            difference = torch.log(depth_est * mask) - torch.log(depth_gt * mask)  # culprit: invalid_depth
            return torch.sqrt((difference**2).mean() - 0.85 * (difference.mean() ** 2)) * 10.0

    criterion = Silog()
    depth, mask = torch.rand(3, 4) + 0.5, torch.ones(3, 4)
    mask[1, 2] = 0

    def loss(model: nn.Module, x: Tensor, depth: Tensor, mask: Tensor) -> Tensor:
        return criterion(F.softplus(model(x)), depth, mask)

    return encoder(), (torch.randn(3, 6), depth, mask), loss


@thread(BASE + "PeterPonyu/aether-3d/issues/134")
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
