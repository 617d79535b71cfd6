"""Group-relative advantages; evaluation samples one answer per prompt."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class GroupAdvantage(nn.Module):
    def __init__(self, generations: int) -> None:
        super().__init__()
        self.generations = generations

    def forward(self, rewards: Tensor) -> Tensor:
        grouped = rewards.view(-1, self.generations)
        mean = grouped.mean(dim=1, keepdim=True)
        std = grouped.std(dim=1, keepdim=True)
        return ((grouped - mean) / (std + 1e-4)).view(-1)


class Trainer(nn.Module):
    def __init__(self, generations: int) -> None:
        super().__init__()
        self.policy = nn.Linear(4, 6)
        self.advantage = GroupAdvantage(generations)

    def forward(self, prompts: Tensor, answers: Tensor, rewards: Tensor) -> Tensor:
        log_probs = F.log_softmax(self.policy(prompts), dim=-1)
        chosen = log_probs.gather(1, answers[:, None]).squeeze(1)
        return -(self.advantage(rewards) * chosen).mean()


def make() -> nn.Module:
    torch.manual_seed(0)
    return Trainer(generations=1)


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    answers = torch.randint(6, (4,), generator=g)
    return torch.randn(4, 4, generator=g), answers, torch.rand(4, generator=g)
