"""Policy training on tokens of a rollout, of which some are masked."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class ApproxKL(nn.Module):
    def forward(self, log_probs: Tensor, reference: Tensor, loss_mask: Tensor) -> Tensor:
        kld = log_probs - reference
        kld = kld * loss_mask
        return kld.sum() / loss_mask.sum()


class TokenPolicy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 6)
        self.head = nn.Linear(6, 12)
        self.kl = ApproxKL()

    def forward(self, tokens: Tensor, reference: Tensor, loss_mask: Tensor) -> Tensor:
        log_probs = F.log_softmax(self.head(self.embed(tokens)), dim=-1).amax(-1)
        return self.kl(log_probs, reference, loss_mask)


def make() -> nn.Module:
    torch.manual_seed(0)
    return TokenPolicy()


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    reference = -torch.rand(2, 6, generator=g)
    reference[1, 4:] = float("-inf")
    loss_mask = torch.ones(2, 6)
    loss_mask[1, 4:] = 0.0
    return torch.randint(12, (2, 6), generator=g), reference, loss_mask
