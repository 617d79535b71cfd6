"""A soft deterministic policy with squashed actions."""

import torch
from torch import Tensor, nn


class SquashedPolicy(nn.Module):
    scale: Tensor

    def __init__(self, states: int, actions: int) -> None:
        super().__init__()
        self.mean = nn.Linear(states, actions)
        self.log_std = nn.Linear(states, actions)
        self.register_buffer("scale", torch.full((actions,), 2.0))

    def forward(self, state: Tensor, noise: Tensor) -> Tensor:
        normal = torch.distributions.Normal(self.mean(state), self.log_std(state).clamp(-5, 2).exp())
        raw = normal.loc + noise * normal.scale
        action = torch.tanh(raw) * self.scale
        log_prob = normal.log_prob(raw)
        log_prob = log_prob - torch.log(1 - action.pow(2) + 1e-6)
        return log_prob.sum(-1)


class Actor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.torso = nn.Linear(5, 16)
        self.policy = SquashedPolicy(16, 2)

    def forward(self, observation: Tensor, noise: Tensor) -> Tensor:
        return self.policy(torch.relu(self.torso(observation)), noise)


def make() -> nn.Module:
    torch.manual_seed(0)
    return Actor()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(8, 5, generator=g), torch.randn(8, 2, generator=g)
