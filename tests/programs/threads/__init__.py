"""Failing trainings of ordinary shape, each rebuilt from the public thread that it names.

They were written without a look at the table of patches. Each returns a model, its batch, and the function that
computes the loss of both.
"""

import torch
from torch import nn


def encoder(inputs: int = 6, outputs: int = 4, gain: float = 1.0) -> nn.Sequential:
    """Return a small network whose outputs grow with `gain`."""
    net = nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))
    with torch.no_grad():
        net[2].weight *= gain
    return net


def identity(size: int) -> nn.Linear:
    """Return a layer that hands its input on until it is trained."""
    net = nn.Linear(size, size, bias=False)
    nn.init.eye_(net.weight)
    return net


def zero_head(inputs: int = 6, outputs: int = 4) -> nn.Sequential:
    """Return a small network whose last layer is initialised with zeros, so that it gives zeros."""
    net = encoder(inputs, outputs, gain=0.0)
    nn.init.zeros_(net[2].bias)
    return net


# These enter their programs.
from . import attention, batches, classification, geometry, likelihoods, small_constants  # noqa: F401
