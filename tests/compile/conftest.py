"""A fresh compiler for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    """Nothing compiled before is used, and nothing is left over."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch.compiler.set_stance("default")
    torch._dynamo.reset()
