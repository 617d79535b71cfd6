"""A gated linear recurrence, scanned in log space, in half precision."""

import torch
from torch import Tensor, nn


def log(t: Tensor) -> Tensor:
    return torch.log(t.clamp(min=1e-8))


class HeinsenScan(nn.Module):
    def forward(self, gates: Tensor, values: Tensor) -> Tensor:
        log_gates = log(gates).cumsum(dim=1)
        return (log_gates + log(values) - log_gates[:, -1:]).exp()


class GateLoop(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.to_gate = nn.Linear(width, width)
        self.to_value = nn.Linear(width, width)
        self.scan = HeinsenScan()

    def forward(self, x: Tensor) -> Tensor:
        return self.scan(torch.sigmoid(self.to_gate(x)), torch.relu(self.to_value(x)))


def make() -> nn.Module:
    torch.manual_seed(0)
    model = GateLoop()
    with torch.no_grad():
        model.to_gate.bias.fill_(3.0)
        model.to_gate.weight[2].zero_()
        model.to_gate.bias[2] = -18.0
    return model.half()


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return ((0.3 * torch.randn(2, 2, 6, generator=g)).half(),)
