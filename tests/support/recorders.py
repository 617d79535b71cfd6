"""Both recorders as parameters of a test, and a watch with either."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from nanwatch.numerics import _extension
from nanwatch.recording.recorder import PythonRecorder
from nanwatch.session.watch import Watch
from support.watching import watch

needs_native = pytest.mark.skipif(_extension.C is None, reason="no compiled part")
needs_cuda = pytest.mark.skipif(
    not torch.cuda.is_available() or _extension.C is None or not _extension.C.cuda_compiled(),
    reason="torch sees no CUDA device, or nanwatch was built without CUDA",
)

# Functions with which a host waits for a device; cudaMemcpy without Async waits too.
WAITS = {"cudaDeviceSynchronize", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaMemcpy"}

RECORDERS = [pytest.param("native", marks=needs_native), "python"]


# With all tensors on a device that does nothing before somebody waits; see conftest.py.
WITH_DEVICE = [*RECORDERS, pytest.param("device", marks=needs_native)]


def watched(model: nn.Module, recorder: str, **options: Any) -> Watch:
    if recorder != "python":
        return watch(model, verify_hits=True, **options)
    with mock.patch("nanwatch.session.watch.make_recorder", PythonRecorder):
        return watch(model, **options)


def available() -> list[str]:
    return ["python"] if needs_native.args[0] else ["native", "python"]
