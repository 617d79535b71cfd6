"""Cell segmentation; each image of the batch is normalised by itself."""

import torch
from torch import Tensor, nn


class ImageNormalise(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        mean = image.mean((1, 2, 3), keepdim=True)
        std = image.std((1, 2, 3), keepdim=True)
        return (image - mean) / std


class CellNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.normalise = ImageNormalise()
        self.unet = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))

    def forward(self, image: Tensor) -> Tensor:
        return self.unet(self.normalise(image)).softmax(1)


def make() -> nn.Module:
    torch.manual_seed(0)
    return CellNet()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    image = torch.rand(6, 1, 8, 8, generator=g)
    image[4] = 0.25
    return (image,)
