"""One fixture runs every range test on each implementation; what this machine lacks is a skip with its reason."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import HealthCheck, settings

from nanwatch.numerics import _extension, _ops, _reference, ranges
from netcheck_ranks import Ranks
from stand_in_device import stand_in

settings.register_profile(
    "nanwatch",
    deadline=None,  # the first call of a kernel pays for its loading
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("nanwatch")

NATIVE_LEVELS = ("baseline", "avx2", "avx512")
IMPLEMENTATIONS = ("reference", *(f"native-{level}" for level in NATIVE_LEVELS), "cuda")


@dataclass(frozen=True)
class Implementation:
    """The public functions as one implementation serves them."""

    name: str
    abs_range: Callable[[torch.Tensor], ranges.AbsRange]
    abs_ranges: Callable[[Sequence[torch.Tensor]], list[ranges.AbsRange]]
    tensor_health: Callable[[torch.Tensor], ranges.TensorHealth]
    device: str = "cpu"

    @property
    def is_native(self) -> bool:
        return self.name.startswith("native")

    def place(self, x: torch.Tensor) -> torch.Tensor:
        """`x` where this implementation reads it, with the same strides, offset and overlaps."""
        if self.device == "cpu" or x.layout is not torch.strided:
            return x.to(self.device)
        moved = torch.empty(0, dtype=x.dtype, device=self.device)
        plain = x.resolve_conj().resolve_neg()
        storage = plain.detach().untyped_storage().to(device=torch.device(self.device))
        return moved.set_(storage, plain.storage_offset(), plain.shape, plain.stride())


def missing(name: str) -> str:
    """Why the implementation cannot run here; "" when it can."""
    if name == "reference":
        return ""
    if name == "cuda":
        return "" if torch.cuda.is_available() else "no CUDA device"
    if _extension.C is None:
        return f"no compiled part: {_extension.reason}"
    level = name.removeprefix("native-")
    return "" if level in _extension.C.cpu_capabilities() else f"this CPU has no {level}"


@contextlib.contextmanager
def active(name: str) -> Iterator[Implementation]:
    """The implementation, held in force inside the block and put back after it."""
    if name == "reference":
        with (
            mock.patch.multiple(
                _ops,
                abs_range=_reference.abs_range,
                abs_ranges=_reference.abs_ranges,
                health=_reference.health,
                exponent_histogram=_reference.exponent_histogram,
                count_from=_reference.count_from,
            ),
            mock.patch.object(_extension, "C", None),
        ):
            yield Implementation(name, ranges._abs_range, ranges.abs_ranges, ranges.tensor_health)
        return
    native = _extension.C
    if name == "cuda" or native is None:
        yield Implementation(name, ranges.abs_range, ranges.abs_ranges, ranges.tensor_health, "cuda")
        return
    before = native.cpu_capability()
    native.set_cpu_capability(name.removeprefix("native-"))
    try:
        yield Implementation(name, ranges.abs_range, ranges.abs_ranges, ranges.tensor_health)
    finally:
        native.set_cpu_capability(before)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.cuda) if name == "cuda" else name for name in IMPLEMENTATIONS
    ],
)
def implementation(request: pytest.FixtureRequest) -> Iterator[Implementation]:
    """Runs the test once per implementation."""
    if reason := missing(request.param):
        pytest.skip(reason)
    with active(request.param) as present:
        yield present


@pytest.fixture(params=["python", "native"])
def each_recorder(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test with both recorders."""
    if request.param == "native":
        if _extension.C is None:
            pytest.skip(f"no compiled part: {_extension.reason}")
        yield
        return
    with mock.patch.object(_extension, "C", None):
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first: what begins last should not be what takes longest."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(scope="session")
def folder_of_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all test processes of a run."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture
def one_process_mesh(tmp_path: os.PathLike[str]) -> Iterator[object]:
    """A device mesh of this process alone."""
    distributed = pytest.importorskip("torch.distributed")
    if not distributed.is_available() or not distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
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
    """What makes the recorder "device" of test_recorder.py: the stand-in, in the place of all devices."""
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
