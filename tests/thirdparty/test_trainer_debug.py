"""The name in Trainer's module: swapped, swapped back, and when."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest

transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

import nanwatch  # noqa: E402
from nanwatch.integrations import debug  # noqa: E402
from support.processes import environment, forked  # noqa: E402

trainer_module = import_module("transformers.trainer")
THEIRS = import_module("transformers.debug_utils").DebugUnderflowOverflow
ENVIRONMENT = environment(OMP_NUM_THREADS="1")


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    """Each test begins and ends with Trainer's own class."""
    debug.unpatch_transformers()
    yield
    debug.unpatch_transformers()


def test_patching_twice_and_undoing():
    """To patch twice is to patch once; undone, Trainer has its own class; debug_utils always has."""
    assert trainer_module.DebugUnderflowOverflow is THEIRS
    for _ in range(2):
        debug.patch_transformers()
        assert issubclass(trainer_module.DebugUnderflowOverflow, nanwatch.DebugUnderflowOverflow)
        assert transformers.debug_utils.DebugUnderflowOverflow is THEIRS
    for _ in range(2):
        debug.unpatch_transformers()
        assert trainer_module.DebugUnderflowOverflow is THEIRS


FRESH = """
import sys, {imports}
before = "transformers.trainer" in sys.modules
import transformers.trainer as trainer
print(before, trainer.DebugUnderflowOverflow.__module__)
from nanwatch.integrations import debug; debug.unpatch_transformers()
print(trainer.DebugUnderflowOverflow.__module__)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "switch", "expected"),
    [
        ("nanwatch", "", "transformers.debug_utils"),
        ("nanwatch", "0", "transformers.debug_utils"),
        ("nanwatch", "1", "nanwatch.integrations.debug"),
        ("nanwatch.integrations.transformers", "", "transformers.debug_utils"),
    ],
)
def test_the_ways_to_patch_in_a_fresh_process(imports, switch, expected):
    """The import of nanwatch patches nothing; the switch does, before Trainer is there."""
    changed = ENVIRONMENT | {"NANWATCH_TRANSFORMERS": switch}
    done = forked("-c", FRESH.format(imports=imports), env=changed, imported=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == [f"False {expected}", "transformers.debug_utils"]
