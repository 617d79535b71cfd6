"""Counts of spikes: the rate is the plain output of a linear layer."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class SpikeLoss(nn.Module):
    def forward(self, rate: Tensor, spikes: Tensor) -> Tensor:
        return F.poisson_nll_loss(rate, spikes, log_input=False)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.readout = nn.Linear(6, 3)
        self.objective = SpikeLoss()

    def forward(self, state: Tensor, spikes: Tensor) -> Tensor:
        return self.objective(self.readout(state), spikes)


def make() -> nn.Module:
    torch.manual_seed(0)
    model = Decoder()
    with torch.no_grad():
        model.readout.weight.abs_()
        model.readout.bias.fill_(0.5)
    return model


def batch(seed: int = 0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    state = torch.rand(5, 6, generator=g)
    state[2] = -1.0
    return state, torch.randint(4, (5, 3), generator=g).float()


def loss(output: Tensor) -> Tensor:
    return output
