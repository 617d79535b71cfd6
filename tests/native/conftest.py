"""The CUDA sources as host code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import cuda_emulation
from support.cuda_emulation import Host


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    """The emulation, with its blocks in order again afterwards."""
    emulation = cuda_emulation.host()
    yield emulation
    emulation.shuffle_blocks(0)
