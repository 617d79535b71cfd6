"""The CUDA sources as host code."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support import cuda_emulation
from support.cuda_emulation import Host


@pytest.fixture(scope="module", params=cuda_emulation.ARCHITECTURES)
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    """Both paths through the source."""
    found = cuda_emulation.host(request.param)
    yield found
    found.shuffle_blocks(0)
