"""Video customisation: the loss counts inside the mask of the person only."""

import torch
from torch import Tensor, nn


class MaskedDenoisingLoss(nn.Module):
    def forward(self, pred: Tensor, noise: Tensor, masks: Tensor) -> Tensor:
        loss = (pred - noise).square() * masks
        per_clip = loss.flatten(1).sum(1) / masks.flatten(1).sum(1)
        return per_clip.mean()


class VideoDenoiser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.unet = nn.Sequential(nn.Conv3d(1, 3, 3, padding=1), nn.SiLU(), nn.Conv3d(3, 1, 3, padding=1))
        self.identity_loss = MaskedDenoisingLoss()

    def forward(self, noisy: Tensor, noise: Tensor, masks: Tensor) -> Tensor:
        return self.identity_loss(self.unet(noisy), noise, masks)


def make() -> nn.Module:
    torch.manual_seed(0)
    return VideoDenoiser()


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    noise = torch.randn(4, 1, 3, 5, 5, generator=g)
    masks = (torch.rand(4, 1, 3, 5, 5, generator=g) > 0.6).float()
    masks[2] = 0.0
    return noise + torch.randn(4, 1, 3, 5, 5, generator=g), noise, masks
