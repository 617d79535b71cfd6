"""A discriminator whose layers are spectrally normalised."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SNLinear(nn.Linear):
    eps = 1e-12

    def forward(self, x: Tensor) -> Tensor:
        u = F.normalize(torch.ones(self.out_features), dim=0, eps=self.eps)
        v = F.normalize(self.weight.detach().T @ u, dim=0, eps=self.eps)
        sigma = u @ self.weight @ v
        return F.linear(x, self.weight / sigma, self.bias)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = SNLinear(8, 8)
        self.out = SNLinear(8, 1)
        nn.init.zeros_(self.out.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.leaky_relu(self.hidden(x), 0.2))


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generate = nn.Linear(4, 8)
        self.discriminate = Discriminator()

    def forward(self, z: Tensor) -> Tensor:
        return F.softplus(-self.discriminate(self.generate(z))).mean()


def make() -> nn.Module:
    torch.manual_seed(0)
    return GAN()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(3, 4, generator=g),)
