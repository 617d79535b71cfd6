"""Survival analysis with the Cox partial likelihood."""

import torch
from torch import Tensor, nn


class CoxPHLoss(nn.Module):
    def forward(self, log_hazard: Tensor, events: Tensor) -> Tensor:
        log_cumsum = log_hazard.exp().cumsum(0).log()  # culprit
        return -((log_hazard - log_cumsum) * events).sum() / events.sum()


class DeepSurv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1, bias=False))
        self.cox = CoxPHLoss()

    def forward(self, covariates: Tensor, durations: Tensor, events: Tensor) -> Tensor:
        order = durations.argsort(descending=True)
        return self.cox(self.net(covariates[order]).squeeze(-1), events[order])


def make() -> nn.Module:
    torch.manual_seed(0)
    model = DeepSurv()
    with torch.no_grad():
        model.net[2].weight.abs_()
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    covariates = torch.randn(10, 4, generator=g)
    covariates[:, 2] = torch.rand(10, generator=g) * 900 + 300
    events = (torch.rand(10, generator=g) > 0.3).float()
    return covariates, torch.rand(10, generator=g), events.index_fill(0, torch.tensor([0]), 1.0)
