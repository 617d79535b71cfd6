"""Training that meets a fault at a chosen place, and an independent account of where it was.

`judge_blackbox.py` runs this file as a script, watched by itself or by `nanwatch run`, in a process that shares the
memory of its account with the judge. `sys.argv[1]` is the Trial as JSON.
"""

from __future__ import annotations

import json
import sys
import threading
from typing import Any

import _box_account
import _box_faults
import torch
from torch import Tensor, nn

import nanwatch

BATCHES = 6


class _Meets(torch.autograd.Function):
    """Identity whose backward calls the fault."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Spied) -> Tensor:
        ctx.module = module
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        ctx.module.meet("backward")
        return gradients[0], None


class Spied(nn.Module):
    """Module that writes into the account when its forward begins and ends and when the gradient of its output came."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.number = -1
        self.account: _box_account.Account | None = None
        self.fault: Any = None

    def forward(self, x: Tensor) -> Tensor:
        account = self.account
        if account is not None:
            account.begin(self.number)
        self.meet("before")
        y = self.inner(x)
        if account is not None:
            account.ended_inner()
        if y.requires_grad:
            y = _Meets.apply(y, self)
        self.meet("after")
        if account is not None:
            if y.requires_grad:
                y.register_hook(lambda gradient: account.gradient(self.number))
            account.end()
        return y

    def meet(self, place: str) -> None:
        if self.fault is not None:
            self.fault(self.number, place)


class Steps(torch.optim.SGD):
    """Optimizer that writes into the account when it steps."""

    account: _box_account.Account
    fault: Any = None

    def step(self, closure: Any = None) -> None:
        self.account.step()
        if self.fault is not None:
            self.fault(-1, "step")
        super().step(closure)


def build() -> nn.Module:
    """Nested model; every module of it is a Spied, or the plain module inside of one."""
    torch.manual_seed(0)
    block = [
        Spied(nn.Sequential(Spied(nn.Linear(16, 32)), Spied(nn.GELU()), Spied(nn.Linear(32, 16))))
        for _ in range(3)
    ]
    return Spied(
        nn.Sequential(Spied(nn.Linear(16, 16)), *block, Spied(nn.LayerNorm(16)), Spied(nn.Linear(16, 1)))
    )


def spied(model: nn.Module) -> dict[str, Spied]:
    """Return the Spied modules by name, in the order of their numbers."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Spied)}


def prepare(model: nn.Module, account: _box_account.Account, fault: Any) -> nn.Module:
    """Give each module its number, the account and the fault."""
    for number, module in enumerate(spied(model).values()):
        module.number, module.account, module.fault = number, account, fault
    return model


def train(model: nn.Module, account: _box_account.Account, fault: Any, batches: int) -> float:
    """Train, and return a checksum of the weights."""
    steps = Steps(model.parameters(), 0.01)
    steps.account, steps.fault = account, fault
    generator = torch.Generator().manual_seed(1)
    for batch in range(batches):
        account.batch(batch)
        fault.batch = batch
        fault(-1, "data")
        model(torch.randn(4, 16, generator=generator)).square().mean().backward()
        steps.step()
        steps.zero_grad()
    return sum(parameter.double().sum().item() for parameter in model.parameters())


def infer(model: nn.Module) -> None:
    """Call the model for ever."""
    with torch.no_grad():
        while True:
            model(torch.ones(4, 16))


def main() -> None:
    """Do what the trial says."""
    trial = _box_account.Trial(**json.loads(sys.argv[1]))
    account = _box_account.SHARED
    fault = _box_faults.Fault(trial, account)
    fault.before_watch()
    model = prepare(build(), account, fault)
    if trial.way == "script":
        nanwatch.watch(model, output_dir=trial.folder or None, gradients=True)
    fault.after_watch()
    account.is_ready = True
    batches = 1_000_000 if trial.fault == "SIGKILL by the parent" else BATCHES
    if trial.threads == 1:
        print(f"{train(model, account, fault, batches):.12f}", flush=True)
        return
    # After a fork PyTorch makes its thread pool again, at the first parallel call of each thread. Two at once end in
    # "Invalid thread pool!" (ATen/ParallelOpenMP.cpp, torch 2.13), so one thread makes it here.
    torch.set_num_threads(torch.get_num_threads())
    threads = [threading.Thread(target=train, args=(model, account, fault, batches))]
    for _ in range(trial.threads - 1):
        other = prepare(build(), account, None)
        if trial.way == "script":
            nanwatch.watch(other, output_dir=trial.folder or None)
        threads.append(threading.Thread(target=infer, args=(other,), daemon=True))
    for thread in reversed(threads):
        thread.start()
    threads[0].join()


if __name__ == "__main__":
    main()
