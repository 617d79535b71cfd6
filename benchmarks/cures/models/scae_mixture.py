"""A capsule autoencoder: image likelihood as a mixture over templates."""

import torch
from torch import Tensor, nn


class MixtureLikelihood(nn.Module):
    def forward(self, image: Tensor, means: Tensor, log_mix: Tensor) -> Tensor:
        log_prob = -0.5 * ((image[:, None] - means) / 0.05).square()
        return torch.log(torch.exp(log_prob + log_mix).sum(1))


class TemplateDecoder(nn.Module):
    def __init__(self, templates: int, pixels: int) -> None:
        super().__init__()
        self.templates = nn.Parameter(torch.rand(templates, pixels))
        self.presence = nn.Linear(pixels, templates)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        log_mix = torch.log_softmax(self.presence(image), dim=-1)[..., None]
        return self.templates[None], log_mix


class CapsuleAutoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = TemplateDecoder(3, 16)
        self.likelihood = MixtureLikelihood()

    def forward(self, image: Tensor) -> Tensor:
        means, log_mix = self.decoder(image)
        return -self.likelihood(image, means, log_mix).mean()


def make() -> nn.Module:
    torch.manual_seed(0)
    return CapsuleAutoencoder()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.rand(4, 16, generator=g) + 1.5,)
