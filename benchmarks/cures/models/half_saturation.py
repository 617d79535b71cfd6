"""A half-precision classifier with the saturation as a fourth channel."""

import torch
from torch import Tensor, nn


class Saturation(nn.Module):
    def __init__(self, eps: float = 1e-8) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, image: Tensor) -> Tensor:
        max_rgb = image.amax(1, keepdim=True)
        delta = max_rgb - image.amin(1, keepdim=True)
        return delta / (max_rgb + self.eps)


class Augment(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hsv = Saturation()

    def forward(self, image: Tensor) -> Tensor:
        return torch.cat([image, self.hsv(image)], dim=1)


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.augment = Augment()
        self.pixel = nn.Linear(4, 6)
        self.head = nn.Linear(6, 2)

    def forward(self, image: Tensor) -> Tensor:
        channels = self.augment(image).flatten(2).transpose(1, 2)
        return self.head(torch.relu(self.pixel(channels)).mean(1))


def make() -> nn.Module:
    torch.manual_seed(0)
    return Classifier().half()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    image = torch.rand(2, 3, 5, 5, generator=g)
    image[0, :, :2] = 0.0
    return (image.half(),)
