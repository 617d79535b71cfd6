"""pytest plugin of nanwatch, outside of its package: without `--nanwatch` pytest must not import torch."""

from __future__ import annotations

import pytest

MARK = (
    "nanwatch(**options): options of nanwatch.watch for the models of this test, such as allow='inf:mask*';"
    " nanwatch(False) leaves them alone"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the flags."""
    group = parser.getgroup("nanwatch", "watch the models that tests call")
    group.addoption("--nanwatch", action="store_true", help="fail a test in which a value is not finite")
    group.addoption(
        "--nanwatch-baseline",
        metavar="FOLDER",
        help="also fail a test whose ranges differ from those in this folder, which gets those that it lacks",
    )
    group.addoption("--nanwatch-update", action="store_true", help="write the baseline of each test anew")


def pytest_configure(config: pytest.Config) -> None:
    """Add the mark, and with a flag the watch."""
    config.addinivalue_line("markers", MARK)
    baseline, is_update = config.getoption("--nanwatch-baseline"), config.getoption("--nanwatch-update")
    if is_update and not baseline:
        raise pytest.UsageError(
            "--nanwatch-update writes a baseline: name its folder with --nanwatch-baseline"
        )
    if config.getoption("--nanwatch") or baseline:
        from nanwatch.integrations.pytest import Plugin

        config.pluginmanager.register(Plugin(baseline, is_update=is_update), "nanwatch-models")
