"""`pytest --nanwatch`: tests of a user's project, run by pytest in a process of its own."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.processes import environment, forked

HEAD = """
import warnings
import nanwatch, pytest, torch
from torch import nn

class Log(nn.Module):
    def forward(self, x):
        return torch.log(x)

class Masked(nn.Module):
    def forward(self, x):
        return x.masked_fill(x > 0, float("-inf"))

def network(last):
    return nn.Sequential(nn.Identity(), last)
"""


PLUGIN = ("-p", "pytest_nanwatch", "-p", "no:cacheprovider", "--strict-markers")
COLUMNS = "300"  # the summary shows whole lines


def test_the_test_in_which_a_value_went_bad_fails(tmp_path: Path) -> None:
    """Also a model that a fixture made, in evaluation mode and without weights; the others pass as they did.

    The mark gives options. Those of a test go before those of its class; wrong ones fail it with the words of `watch`.
    """
    body = """
@pytest.fixture
def net():
    return network(Log()).eval()

def test_bad(net):
    with torch.no_grad():
        net(torch.zeros(2))

def test_good(net):
    net(torch.ones(2))

def test_part(net):
    net[1](torch.zeros(2))

def test_value_error(net):
    with pytest.raises(ValueError, match="mine"):
        net(torch.zeros(2))
        raise ValueError("mine")

def test_own_failure(net):
    assert net(torch.zeros(2)).isfinite().all()

@pytest.mark.xfail(strict=True)
def test_expected(net):
    net(torch.zeros(2))

@pytest.mark.nanwatch(allow=["inf:1", "inf:*"])
class TestMasked:
    def test_meant(self):
        network(Masked())(torch.ones(2))

    def test_two_models(self):
        nn.Linear(2, 2)(torch.ones(2))
        network(Masked())(torch.ones(2))

    @pytest.mark.nanwatch(allow=(), ignore_modules="nothing.*")
    def test_not_meant(self):
        network(Masked())(torch.ones(2))

@pytest.mark.nanwatch(False)
def test_left_alone():
    network(Log())(torch.zeros(2))

@pytest.mark.nanwatch(gradients=True)
def test_backward():
    weight = nn.Linear(1, 1)
    weight(torch.ones(1)).sqrt().sub(weight(torch.ones(1)).detach().sqrt()).sqrt().sum().backward()

@pytest.mark.nanwatch(alow_inf="1")
def test_typo():
    pass

@pytest.mark.nanwatch(modules="encoder.*")
def test_no_such_module():
    network(Log())(torch.zeros(2))
"""
    Path(tmp_path, "test_it.py").write_text(HEAD + body)
    code = "import sys, pytest; sys.exit(pytest.main(sys.argv[1:]))"
    done = forked("-c", code, *PLUGIN, "--nanwatch", cwd=tmp_path, env=environment(COLUMNS=COLUMNS))
    result = pytest.RunResult(done.returncode, done.stdout.splitlines(), done.stderr.splitlines(), 0.0)
    result.assert_outcomes(passed=4, failed=8, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "-inf first seen in `output` of 1 (Log) in batch 0",
            "By: *aten.log.default at *test_it.py:8.",
            "*- Captured nanwatch call -*",
            "FAILED test_it.py::test_bad - Failed: -inf first seen in `output` of 1 (Log) in batch 0",
            "FAILED test_it.py::test_part - Failed: -inf first seen in `output` of 1 (Log) in batch 0",
            "FAILED test_it.py::test_value_error - Failed: -inf first seen *",
            "FAILED test_it.py::test_own_failure - assert *",
            "FAILED *::test_not_meant - Failed: -inf first seen in `output` of 1 (Masked) in batch 0",
            "FAILED *::test_backward - Failed: *.grad* in the backward of batch 0",
            "FAILED *::test_typo - Failed: options of nanwatch: watch has no option 'alow_inf'; *",
            "FAILED *::test_no_such_module - Failed: nanwatch watches no model: Sequential: modules *",
        ]
    )


def test_the_baseline_is_written_compared_and_updated(tmp_path: Path) -> None:
    """By test and model. A test that fails by itself writes none."""
    body = """
import os

@pytest.mark.parametrize("size", [2, 3])
def test_net(size):
    network(nn.Identity())(torch.ones(size) * float(os.environ["SCALE"]))
    network(nn.Tanh())(torch.zeros(size))

def test_fails():
    network(nn.Identity())(torch.ones(1))
    assert False
"""
    Path(tmp_path, "test_it.py").write_text(HEAD + body)
    code = f"""
import os, pytest
for scale, update in (("1", ()), ("1.5", ()), ("1.5", ["--nanwatch-update"]), ("1.5", ())):
    os.environ["SCALE"] = scale
    pytest.main([*{PLUGIN}, "--nanwatch-baseline", "stored", *update])
pytest.main([*{PLUGIN}, "--nanwatch-update"])
"""
    done = forked("-c", code, cwd=tmp_path, env=environment(COLUMNS=COLUMNS))
    stored = sorted(Path(tmp_path, "stored").iterdir())
    assert [path.name.rpartition("-")[2] for path in stored] == ["0.parquet", "1.parquet"] * 2
    outcomes = re.findall(r"^=+ (\d failed.*) in ", done.stdout, re.MULTILINE)
    assert outcomes == ["1 failed, 2 passed", "3 failed", "1 failed, 2 passed", "1 failed, 2 passed"]
    assert done.stdout.count("Failed: differs from its baseline") == 2
    assert "abs_max 1 against 1.5" in done.stdout
    assert "name its folder with --nanwatch-baseline" in done.stderr


def test_without_the_flag_it_imports_no_torch(tmp_path: Path) -> None:
    """The mark is known, and models are left alone."""
    Path(tmp_path, "test_it.py").write_text(
        """
import sys, pytest

@pytest.mark.nanwatch(allow="inf:1")
def test_nothing():
    assert not {"torch", "nanwatch"} & set(sys.modules)
"""
    )
    words = [sys.executable, "-m", "pytest", *PLUGIN]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert (done.returncode, "1 passed" in done.stdout) == (0, True)
