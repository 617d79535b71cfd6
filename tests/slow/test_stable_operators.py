"""The operators over PyTorch's stable ABI, which a wheel loads where none of its modules fits this PyTorch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import nanwatch
from support.paths import ROOT

pytestmark = pytest.mark.skipif(not (ROOT / "csrc" / "stable").exists(), reason="needs the source tree")

BUILD = """
import sys
from pathlib import Path
sys.path[:0] = [{csrc!r}, {csrc!r} + "/cuda"]
from build_units import Compiled
from torch_headers import installed_torch
compiled = Compiled(Path({folder!r}), jobs=2)
compiled.ninja.run("the operators", [compiled.stable_operators(installed_torch(), [])])
"""

VIEWS = """
import torch
from nanwatch.numerics import _extension, _reference
assert _extension.C is None
assert _extension.stable_operators
x = torch.randn(7, 6, dtype=torch.complex64)
for view in (x.real, x.conj().imag, x.imag.t(), torch.ones(0), torch.arange(5)[::2], x.real[:, :1].expand(7, 3)):
    for name in ("abs_range", "health"):
        got, expected = getattr(_extension, name)(view), getattr(_reference, name)(view)
        assert torch.equal(got, expected), (name, view, got, expected)
assert _extension.abs_ranges([torch.ones(3), x.real]).tolist()[0] == [1.0, 1.0, 1.0]
freed = torch.ones(4)
freed.untyped_storage().resize_(0)
try:
    torch.ops.nanwatch.abs_range(freed)
except RuntimeError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the package as a wheel for other versions of torch would have it."""
    folder = tmp_path_factory.mktemp("stable")
    code = BUILD.format(csrc=str(ROOT / "csrc"), folder=str(folder / "build"))
    # Not optimized: what is compared is the answers, and the kernels compile in a third of the time.
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "CXXFLAGS": "-O0"}, check=True)
    package = Path(nanwatch.__file__).parent
    ignore = shutil.ignore_patterns("__pycache__", "_C*.so")
    shutil.copytree(package, folder / "place" / "nanwatch", ignore=ignore)
    shutil.copy(folder / "build" / "stable" / "_stable_ops.so", folder / "place" / "nanwatch")
    (folder / "place" / "nanwatch" / "_build.json").write_text(json.dumps({"torch": "2.1.2 2.2.0"}))
    return folder / "place"


def run(place: Path, *arguments: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("NANWATCH")}
    command = [sys.executable, "-W", "ignore", *arguments]
    done = subprocess.run(command, env={**env, "PYTHONPATH": str(place)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_they_agree_with_the_reference_in_every_dtype(place):
    """The self-check compares them, and the doctor says that the recorder is missing."""
    found = json.loads(run(place, "-m", "nanwatch", "--selfcheck", "--json"))
    assert found["selfcheck"]["passed"]
    assert found["devices"][0]["implementation"] == "native"
    assert not found["compiled"]["loaded"]
    assert "2.1.2, 2.2.0" in found["compiled"]["reason"]


def test_they_read_views_and_refuse_a_freed_storage(place):
    """A view under the conjugate or negative bit, a transposed, an empty, and one with steps."""
    assert "freed or resized" in run(place, "-c", VIEWS)
