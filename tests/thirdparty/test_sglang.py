"""The plugin of SGLang, in a package that stands for SGLang: it does not install on a CPU.

Read in its sources in November 2026: HookRegistry's AROUND and the fields of ForwardBatch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.integrations import start_in_sglang
from support.toys import Scale


class HookType(Enum):
    AROUND = "around"


class HookRegistry:
    """Applies an AROUND hook at once, as `apply_hooks` does after all plugins: `hook(original, *args, **kwargs)`."""

    @staticmethod
    def register(target: str, hook: Callable[..., Any], hook_type: HookType) -> None:
        assert hook_type is HookType.AROUND
        place, _, name = target.rpartition(".")
        module, _, owner = place.rpartition(".")
        holder = getattr(import_module(module), owner)
        original = getattr(holder, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            return hook(original, *args, **kwargs)

        setattr(holder, name, wrapped)


class Model(nn.Module):
    """A decoder of two layers, and the logits of each request's last token; called by `forward`, as SGLang does."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(Scale(), Scale())
        self.logits_processor = nn.Identity()

    def forward(self, x: Tensor, last: list[int]) -> Tensor:
        logits: Tensor = self.logits_processor(self.model(x)[last])
        return logits


class ModelRunner:
    def __init__(self) -> None:
        self.model = Model()

    def forward(self, batch: Any, *, skip_attn_backend_init: bool = False) -> Any:
        lengths = batch.extend_seq_lens_cpu if batch.forward_mode.is_extend() else [1] * len(batch.rids)
        last = (torch.tensor(lengths).cumsum(0) - 1).tolist()
        return SimpleNamespace(
            logits_output=SimpleNamespace(next_token_logits=self.model.forward(batch.x, last))
        )


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runner of a fresh fake of SGLang, whose plugin has been loaded."""
    monkeypatch.setenv("NANWATCH", "1")
    monkeypatch.delenv("NANWATCH_OPTIONS", raising=False)
    made = type("ModelRunner", (ModelRunner,), {"forward": ModelRunner.forward})
    contents = {
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        "sglang.srt.model_executor.model_runner": {"ModelRunner": made},
    }
    for path, names in contents.items():
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            module = ModuleType(".".join(parts[:end]))
            module.__path__ = []  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, module.__name__, module)
        vars(module).update(names)
    start_in_sglang()
    return made()


def batch(x: Tensor, *, extend: bool) -> Any:
    """A ForwardBatch of two requests: in prefill the first has two tokens after a cached one."""
    return SimpleNamespace(
        rids=["a", "b"],
        forward_mode=SimpleNamespace(is_extend=lambda: extend),
        extend_seq_lens_cpu=[2, 1],
        extend_prefix_lens_cpu=[1, 0],
        seq_lens_cpu=torch.tensor([5, 9]),
        x=x,
    )


@pytest.mark.parametrize(
    ("row", "extend", "expected"),
    [(1, True, ("a", "prefill", 2)), (2, True, ("b", "prefill", 0)), (1, False, ("b", "decode", 8))],
)
def test_the_request_of_a_bad_row_is_named(
    runner: Any, row: int, extend: bool, expected: tuple[str, str, int]
) -> None:
    x = torch.ones(3 if extend else 2, 4)
    answered = runner.forward(batch(x, extend=extend), skip_attn_backend_init=True)
    assert answered.logits_output.next_token_logits.shape == (2, 4)
    assert not runner._nanwatch.requests
    x[row] = float("inf")
    runner.forward(batch(x, extend=extend))
    [bad] = runner._nanwatch.requests.values()
    assert (bad.request, bad.phase, bad.position) == expected
    assert bad.module == "model"  # whose input the row came in
    runner._nanwatch.stop()
