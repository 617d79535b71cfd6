"""State that was bad before the call: weights, buffers, data, a step; and calls that fail only once."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from programs.case import Setup, failure, sequence
from support.spy import Spy


class Autoencoder(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Linear(width, 4)
        self.bn = nn.BatchNorm1d(4)
        self.decoder = nn.Linear(4, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.encoder(x)
        h = self.bn(h)  # culprit: negative_running_var
        return self.decoder(torch.relu(h))


@failure(module="decoder", label="weight", origin="weight")
def poisoned_checkpoint() -> Setup:
    """A checkpoint has a nan in a weight."""
    state = Autoencoder().state_dict()
    state["decoder.weight"][5, 2] = float("nan")  # as a run that diverged saved it
    model = Autoencoder().eval()
    model.load_state_dict(state)
    return Setup(model, (torch.randn(4, 8),))


@failure(
    module="bn",
    operations="native_batch_norm _native_batch_norm_legit_no_training _batch_norm_impl_index batch_norm",
)
def negative_running_var() -> Setup:
    """The running_var of a checkpoint is negative."""
    model = Autoencoder().eval()
    model.bn.running_var[1] = -0.5
    return Setup(model, (torch.randn(4, 8),))


@failure(module="bn", label="running_mean", origin="buffer", value="inf")
def poisoned_running_mean() -> Setup:
    """Running statistics took in an inf of an earlier batch."""
    model = Autoencoder().eval()
    model.bn.running_mean[3] = float("inf")
    return Setup(model, (torch.randn(4, 8),))


@failure(module="", label="input[0]", origin="data", value="inf")
def inf_in_data() -> Setup:
    """The data has an inf, as a ratio made it."""
    x = torch.randn(4, 3)
    x[2, 1] = float("inf")
    return Setup(nn.Linear(3, 1), (x,))


class SplitReduce(nn.Module):
    """A sum in parts, added up in a workspace that each launch leaves at zero for the next.

    The bug: the workspace comes from the allocator as it is, so the first launch adds to what lay there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._workspace: Tensor | None = None
        self._launches = Spy()  # as an allocator's memory, it is not put back for a re-run

    def forward(self, x: Tensor) -> Tensor:
        if self._workspace is None:
            lay_there = bytearray((b"\0" if self._launches.values else b"\xff") * 4 * x.shape[-1])
            self._launches.add()
            self._workspace = torch.frombuffer(lay_there, dtype=torch.float32)
        for part in x.chunk(4):
            self._workspace += part.sum(0)
        total = self._workspace.clone()
        self._workspace.zero_()
        return total


@failure(module="reduce", transient=True)
def uninitialised_workspace() -> Setup:
    """A kernel reads memory before it is written: wrong at its first launch only."""
    model = sequence(proj=nn.Linear(8, 8), reduce=SplitReduce())
    return Setup(model, (torch.randn(16, 8),))


class Regressor(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(width, inner)
        self.out = nn.Linear(inner, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.silu(self.hidden(x)))


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x).squeeze(-1), y)
        loss.backward()
        optimizer.step()


@failure(module="hidden", label="weight", origin="weight")
def weights_diverge() -> Setup:
    """The learning rate is too high: the step makes the weights nan before an output is."""
    model = Regressor(8, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=100.0)
    x = 10 * torch.randn(32, 8)
    return Setup(model, loop=lambda: fit(model, optimizer, x, x.sum(-1), 20))
