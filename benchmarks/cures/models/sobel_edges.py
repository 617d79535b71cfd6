"""Super resolution with an edge loss."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Sobel(nn.Module):
    kernels: Tensor

    def __init__(self) -> None:
        super().__init__()
        gx = torch.tensor([[2.0, 0.0, -2.0], [4.0, 0.0, -4.0], [2.0, 0.0, -2.0]])
        self.register_buffer("kernels", torch.stack([gx, gx.T])[:, None])

    def forward(self, image: Tensor) -> Tensor:
        gradients = F.conv2d(image, self.kernels)
        return torch.sqrt(torch.sum(gradients * gradients, dim=1, keepdim=True))


class Upscaler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.refine = nn.Conv2d(1, 1, 1)
        self.edges = Sobel()

    def forward(self, small: Tensor, large: Tensor) -> Tensor:
        up = self.refine(F.interpolate(small, scale_factor=2, mode="nearest"))
        return (self.edges(up) - self.edges(large)).abs().mean()


def make() -> nn.Module:
    torch.manual_seed(0)
    return Upscaler()


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    small = torch.rand(1, 1, 6, 6, generator=g)
    small[..., :3] = 0.5
    return small, torch.rand(1, 1, 12, 12, generator=g)


def loss(output: Tensor) -> Tensor:
    return output
