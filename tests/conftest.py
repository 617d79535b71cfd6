"""Markers of folders, golden files, and the fixtures that several folders use."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from importlib.machinery import FileFinder, SourceFileLoader
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings

import nanwatch.instrumentation.calls  # noqa: F401 - its classes need the compiled part, which a fixture hides
from nanwatch.numerics import _extension
from support.implementations import IMPLEMENTATIONS, Implementation, Place, active, missing, placed
from support.netcheck_ranks import Ranks
from support.paths import GOLDEN, TESTS
from support.stand_in_device import stand_in

# The folders whose tests all have a marker.
MARKERS = {
    **{folder: folder for folder in ("compile", "distributed", "thirdparty", "native", "slow")},
    "gpu": "cuda",
}


# Only for `make test-torchao`: transformers looks for torchao too, and does not know the version of this one. The
# torchvision beside it would keep transformers from being imported, so this finds torchao alone.
if os.environ.get("NANWATCH_TEST_TORCHAO") == "1":
    engines = FileFinder(str(Path(sys.prefix, "engines")), (SourceFileLoader, [".py"]))
    find = lambda name, *_: engines.find_spec(name) if name == "torchao" else None  # noqa: E731
    sys.meta_path.append(SimpleNamespace(find_spec=find))

# The first call of a kernel pays for its loading, so there is no deadline.
is_repeatable, no_check = bool(os.environ.get("CI")), [HealthCheck.too_slow]
settings.register_profile(
    "nanwatch", deadline=None, derandomize=is_repeatable, suppress_health_check=no_check
)
settings.load_profile("nanwatch")


@pytest.fixture(scope="module", params=[*IMPLEMENTATIONS[:-1], pytest.param("cuda", marks=pytest.mark.cuda)])
def implementation(request: pytest.FixtureRequest) -> Iterator[Implementation]:
    """Runs the test once per implementation."""
    if reason := missing(request.param):
        pytest.skip(reason)
    with active(request.param) as present:
        yield present


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def place(request: pytest.FixtureRequest) -> Place:
    """The function that puts a tensor on each device: for what is read by torch's own operations everywhere."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return functools.partial(placed, device=request.param)


@pytest.fixture(params=["python", "native"])
def each_recorder(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test with both recorders."""
    if request.param == "native":
        if _extension.C is None:
            pytest.skip(f"no compiled part: {_extension.reason}")
        yield
        return
    with mock.patch.multiple(_extension, C=None, reason=_extension._OFF):  # which warns of nothing
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--update-golden`."""
    parser.addoption("--update-golden", action="store_true", help="write the files in tests/golden anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compare a text with the golden file of that name, or write the file with `--update-golden`."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert text.splitlines() == path.read_text(encoding="utf-8").splitlines()

    return check


def pytest_itemcollected(item: pytest.Item) -> None:
    """Give each test the marker of its folder."""
    folder = item.path.relative_to(TESTS).parts[0]
    if marker := MARKERS.get(folder):
        item.add_marker(marker)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first: what begins last should not be what takes longest."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="module", autouse=True)
def small_heap() -> None:
    """Exempt all that is there from garbage collection: `gc.collect()` over thousands of tests took 2 s."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def one_process_mesh(tmp_path: os.PathLike[str]) -> Iterator[object]:
    """A device mesh of this process alone."""
    from torch import distributed
    from torch.distributed.device_mesh import DeviceMesh

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        yield DeviceMesh("cpu", [0])
    finally:
        distributed.destroy_process_group()


@pytest.fixture(name="ranks")
def started_ranks() -> Iterator[Ranks]:
    """Killed at the end, should one be left."""
    started = Ranks()
    yield started
    started.kill()


@pytest.fixture(autouse=True)
def recorder_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """Make the recorder "device" of test_recorder.py: the stand-in, in the place of all devices."""
    callspec = getattr(request.node, "callspec", None)
    if callspec is None or callspec.params.get("recorder") != "device":
        yield
        return
    with stand_in():
        yield


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
