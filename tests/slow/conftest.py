"""The browser that opens the pages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.chromium import Browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One Chromium for all tests, each in a tab of its own."""
    with Browser(tmp_path_factory.mktemp("profile")) as running:
        yield running
