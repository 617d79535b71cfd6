"""Programs that keep state, in forwards and in losses, and go on after a failure."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from programs.state import ends, keeps_state, train


class CountsCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.log = nn.Linear(4, 4), 0, []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.log.append(self.calls)
        h = self.linear(x)
        if self.calls == 3:
            h = torch.sqrt((h - h).sum(-1))  # culprit: forward_counts_its_calls
        return h


@keeps_state("sqrt")
def forward_counts_its_calls():
    model = CountsCalls()
    train(model, lambda step: model(torch.randn(3, 4)).sum())
    return {"calls": model.calls, "log": model.log, **ends(model)}


class WritesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        memory[:, 0] += 1
        x.sub_(memory)
        return self.linear(x) / memory[:, 3:]  # culprit: forward_writes_tensors_of_the_program


@keeps_state("div")
def forward_writes_tensors_of_the_program():
    model, memory, inputs = WritesItsInput(), torch.ones(3, 4), []

    def loss_of(step: int) -> Tensor:
        memory[1, 3] = float(step != 2)
        inputs.append(torch.randn(3, 4))
        return model(inputs[-1], memory).sum()

    train(model, loss_of)
    return {"memory": memory.tolist(), "inputs": [x.tolist() for x in inputs], **ends(model)}


@keeps_state("div")
def loss_is_a_closure_with_a_counter():
    model, calls, norms = nn.Linear(4, 2), 0, []

    def masked(out: Tensor, mask: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        norms.append(out.detach().norm().item())
        return (out.square().mean(-1) * mask).sum() / mask.sum()  # culprit: loss_is_a_closure_with_a_counter

    train(model, lambda step: masked(model(torch.randn(3, 4)), torch.full((3,), float(step != 3))))
    return {"calls": calls, "norms": norms, **ends(model)}


class Clip(torch.autograd.Function):
    """Divides the gradient by a running norm, which its backward updates in place."""

    norm = torch.zeros(())

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Clip.norm.mul_(0.0).add_(gradient.norm())
        return gradient / Clip.norm  # culprit: function_of_autograd_keeps_a_tensor


@keeps_state("div")
def function_of_autograd_keeps_a_tensor():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    train(model, lambda step: (Clip.apply(model(torch.randn(3, 4))) * float(step != 2)).sum())
    return {"norm": Clip.norm.item(), **ends(model)}
