"""A linear-chain tagger that takes the logarithm of a probability which it has exponentiated the line before."""

import torch
from torch import Tensor, nn


class Chain(nn.Module):
    def __init__(self, labels: int = 5) -> None:
        super().__init__()
        self.transitions = nn.Parameter(torch.randn(labels, labels))

    def forward(self, emissions: Tensor, tags: Tensor) -> Tensor:
        labelled = emissions.gather(-1, tags[..., None])[..., 0].sum(1)
        labelled = labelled + self.transitions[tags[:, :-1], tags[:, 1:]].sum(1)
        alpha = emissions[:, 0]
        for t in range(1, emissions.shape[1]):
            alpha = torch.logsumexp(alpha[:, :, None] + self.transitions, 1) + emissions[:, t]
        total = torch.logsumexp(alpha, 1)
        p = torch.exp(labelled - total)
        return -torch.log(p)


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, 5)
        self.chain = Chain()

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        return self.chain(self.embed(words), tags).mean()


def make() -> nn.Module:
    torch.manual_seed(0)
    return Tagger()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 30, (3, 60), generator=g), torch.randint(0, 5, (3, 60), generator=g)
