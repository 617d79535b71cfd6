"""Handles: hooks that are taken off by hand or with their owner."""

from __future__ import annotations

import gc

import torch
from torch import nn

from nanwatch.instrumentation.global_hooks import Handles


class Owner:
    """Has hooks on the calls of a module, and counts them."""

    def __init__(self, module: nn.Module, calls: list[str]) -> None:
        self.hooks = Handles(
            self, [module.register_forward_hook(lambda *_: calls.append("called")) for _ in range(2)]
        )


def test_hooks_go_when_asked_or_with_their_owner() -> None:
    """Each is there until then, none after; to ask twice, and to be collected after it, does nothing."""
    module, calls = nn.Identity(), []
    for by_hand in (True, False):
        owner = Owner(module, calls)
        module(torch.ones(1))
        assert len(calls) == 2
        if by_hand:
            owner.hooks.remove()
            owner.hooks.remove()
        del owner
        gc.collect()
        module(torch.ones(1))
        assert len(calls) == 2
        calls.clear()
