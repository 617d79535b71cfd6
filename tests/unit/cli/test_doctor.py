"""`python -m nanwatch`, the self-check, and what the loader says when the compiled part is missing."""

from __future__ import annotations

import copy
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import nanwatch
from nanwatch.__main__ import main
from nanwatch.cli import doctor
from nanwatch.numerics import _extension
from support.processes import forked

PACKAGE = Path(nanwatch.__file__).parent

needs_extension = pytest.mark.skipif(_extension.C is None, reason=f"no compiled part: {_extension.reason}")


def environment(place: Path = PACKAGE.parent, **changes: str) -> dict[str, str]:
    """Return the environment of a user who has set these variables alone."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("NANWATCH")}
    return env | {"PYTHONPATH": str(place), **changes}


def run(*arguments: str, place: Path = PACKAGE.parent, **changes: str) -> subprocess.CompletedProcess[str]:
    return forked(*arguments, env=environment(place, **changes), imported=False)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with a copy of the package, to spoil."""
    shutil.copytree(PACKAGE, tmp_path / "nanwatch", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def reason_in(place: Path) -> str:
    done = run("-m", "nanwatch", "--json", place=place)
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)["compiled"]
    assert not compiled["loaded"]
    return compiled["reason"]


@pytest.mark.slow
@needs_extension
def test_a_level_that_there_is_not_is_told_when_the_library_is_loaded():
    """A misspelt NANWATCH_CPU warns at import, with what is accepted; a right one, or none, does not."""
    for level, count in (("avx99", 1), ("baseline", 0), ("", 0)):
        done = run("-c", "import nanwatch", **({"NANWATCH_CPU": level} if level else {}))
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("RuntimeWarning: NANWATCH_CPU=avx99") == count
        assert ("accepted here: baseline" in done.stderr) == (count == 1)


def test_json_is_one_document_and_nothing_else():
    """A program can read stdout as it is; it holds what the text shows."""
    command = [sys.executable, "-m", "nanwatch", "--json"]
    env = environment(NANWATCH_EXT=os.environ.get("NANWATCH_EXT", ""))
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["torch"]["version"] == torch.__version__
    assert found["compiled"]["loaded"] == (_extension.C is not None)
    assert found["devices"][0]["device"] == "cpu"


@pytest.mark.parametrize("name", [["doctor"], []])
def test_the_text_names_versions_devices_and_threads(name, capsys):
    """Without --json it is lines for a person, one fact each; the command's name may be left out."""
    assert main(name) == 0
    out = capsys.readouterr().out
    labels = [line.split("  ")[0].strip() for line in out.splitlines()]
    for label in ("nanwatch", "python", "torch", "compiled part", "threads", "cpu"):
        assert label in labels
    assert torch.__version__ in out


@pytest.mark.parametrize("name", [["doctor"], []])
def test_help_shows_examples(name, capsys):
    """--help is enough to use it."""
    with pytest.raises(SystemExit) as left:
        main([*name, "--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert "exit status" in out
    assert "--selfcheck" in out
    assert "examples:" in out


def test_switched_off_is_reported_as_the_users_wish():
    """NANWATCH_EXT=0 runs without the compiled part, says so, and warns about nothing."""
    used = run(
        "-W",
        "error::RuntimeWarning",
        "-c",
        "import torch, nanwatch; from nanwatch import _extension as e;"
        "print(e.C, nanwatch.abs_range(torch.ones(3)).abs_max, e.reason)",
        NANWATCH_EXT="0",
    )
    assert used.stdout.strip() == "None 1.0 switched off by NANWATCH_EXT=0", used.stderr


def test_an_unknown_value_of_the_switch_is_refused():
    """A misspelt NANWATCH_EXT is an error that names it and what is accepted, not a silent default."""
    done = run("-c", "import nanwatch", NANWATCH_EXT="off")
    assert done.returncode != 0
    assert "NANWATCH_EXT='off'" in done.stderr
    assert "use 0" in done.stderr


@pytest.mark.slow
@needs_extension
@pytest.mark.parametrize("level", ["baseline"] if _extension.C is None else _extension.C.cpu_capabilities())
def test_the_cpu_level_asked_for_is_the_one_in_force(level):
    """NANWATCH_CPU holds the dispatch, and the doctor reports what was held."""
    found = json.loads(run("-m", "nanwatch", "--json", NANWATCH_CPU=level).stdout)
    assert found["cpu"]["capability"] == level
    assert found["devices"][0]["implementation"] == f"native ({level})"


@pytest.mark.slow
def test_a_module_of_another_torch_is_not_loaded(copied):
    """Its binary interface may differ where nothing would notice: both versions and the cure are named."""
    (copied / "nanwatch" / "_build.json").write_text(json.dumps({"torch": "2.1.0"}))
    reason = reason_in(copied)
    assert "2.1.0" in reason
    assert torch.__version__ in reason
    assert "pip install" in reason


@needs_extension
def test_a_wheel_loads_the_module_of_this_torch_and_no_other(copied):
    """Its modules have the minor version in their names; the doctor says which was loaded and which there are."""
    (module,) = copied.glob("nanwatch/_C*.so")
    minor = ".".join(torch.__version__.split(".")[:2])
    module.with_name(module.name.replace("_C", "_C-torch2.1")).write_bytes(b"not a library")
    module.rename(module.with_name(module.name.replace("_C", f"_C-torch{minor}")))
    (copied / "nanwatch" / "_build.json").write_text(json.dumps({"torch": f"2.1.2+cu1 {minor}.99"}))
    done = run("-m", "nanwatch", place=copied)
    assert "compiled part   loaded" in done.stdout, done.stdout
    assert f"built with    torch {_extension.C.build_info()['torch']}," in done.stdout
    assert f"2.1.2+cu1, {minor}.99" in done.stdout


def test_a_wheel_without_a_module_for_this_torch_says_which_it_has(copied):
    """Not even the module of an install from source is taken: it was not built for this torch either."""
    (copied / "nanwatch" / "_build.json").write_text(json.dumps({"torch": "2.1.2 2.2.0"}))
    assert f"torch 2.1.2, 2.2.0 and this is torch {torch.__version__}" in reason_in(copied)


@needs_extension
@pytest.mark.parametrize("is_stale", [True, False])
def test_a_module_that_is_older_than_the_sources_is_not_loaded(copied, is_stale):
    """A digest in the stub changes with each declared field; then Python does the work, and one line says why."""
    stub = copied / "nanwatch" / "_C.pyi"
    (copied / "nanwatch" / "_build.json").write_text(
        json.dumps({"stub": hashlib.sha256(stub.read_bytes()).hexdigest()})
    )
    if is_stale:
        stub.write_text(stub.read_text().replace("# headers: ", "# headers: 0"))
    program = "import nanwatch as n, torch as t; m = t.nn.ReLU(); w = n.watch(m); m(t.ones(2)); print(len(w.frames))"
    done = run("-c", program, place=copied)
    assert done.stdout == "1\n"
    words = "Reason: it is older than the Python sources, whose records or calls are others by now; rebuild it: pip"
    assert (words in done.stderr) == is_stale


def test_a_missing_module_is_said_to_be_missing(copied):
    """Without the file and without a record of a failed build, the reason is that it is not there."""
    for path in (*copied.glob("nanwatch/_C*.so"), *copied.glob("nanwatch/_build.json")):
        path.unlink()
    assert "not installed for this Python" in reason_in(copied)


@pytest.mark.slow
@needs_extension
def test_a_damaged_module_costs_speed_and_not_the_import(copied):
    """A file that the loader refuses is reported with the loader's own words."""
    (module,) = copied.glob("nanwatch/_C*.so")
    module.write_bytes(b"not a library")
    assert "could not be loaded" in reason_in(copied)


@pytest.mark.parametrize(
    "text", ["{", *(pytest.param(text, marks=pytest.mark.slow) for text in ("", "[1, 2]", "\x00"))]
)
def test_a_damaged_build_record_is_ignored(copied, text):
    """The record is a help, never a reason to fail."""
    (copied / "nanwatch" / "_build.json").write_text(text)
    done = run("-m", "nanwatch", "--json", place=copied)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["compiled"]["build"] == {}


@pytest.mark.slow
@needs_extension
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_one_openmp_runtime_serves_torch_and_nanwatch():
    """A second libgomp would bring a second pool of threads to the same cores."""
    script = (
        "import torch, nanwatch; from nanwatch.cli import doctor;"
        "x = torch.ones(1 << 24); x.sum(); nanwatch.abs_range(x); print(len(doctor._openmp_libraries()))"
    )
    done = run("-c", script)
    assert done.stdout.strip() == "1", done.stderr


def test_selfcheck_passes_here(capsys):
    """Every implementation of this machine equals the reference; one outcome for each dtype of each."""
    assert main(["--selfcheck", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["selfcheck"]
    assert [outcome for outcome in found["outcomes"] if outcome["error"]] == []
    assert found["passed"]
    assert len(found["outcomes"]) == len(doctor.implementations()) * len(
        nanwatch.numerics._reference.READABLE_DTYPES
    )


@pytest.mark.parametrize("column", range(11))
def test_selfcheck_sees_a_wrong_number(monkeypatch, column):
    """One column off by one makes it fail and exit with 1."""
    right = _extension.health

    def wrong(x: torch.Tensor) -> torch.Tensor:
        row = right(x)
        if x.numel() > 4000:
            row[column] += 1
        return row

    monkeypatch.setattr(_extension, "health", wrong)
    monkeypatch.setattr(doctor._reference, "READABLE_DTYPES", frozenset({torch.float16}))
    assert doctor.main(["--selfcheck", "--json"]) == 1


def test_selfcheck_goes_on_after_a_crash(monkeypatch, capsys):
    """An implementation that raises is reported as wrong, and the others are still checked."""

    def broken(x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(_extension, "abs_range", broken)
    assert doctor.main(["--selfcheck"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "no such kernel" in line]
    assert len(lines) == len(doctor.implementations()) * len(nanwatch.numerics._reference.READABLE_DTYPES)


def test_selfcheck_says_what_was_equal_and_what_was_skipped(monkeypatch, capsys):
    """A device that cannot make a tensor of a dtype is no error: the line has torch's own reason."""
    monkeypatch.setattr(doctor._reference, "READABLE_DTYPES", frozenset({torch.uint8}))
    assert doctor.main(["--selfcheck"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "self-check: all equal"
    compared = [line.split("uint8")[1].strip() for line in lines if " uint8 " in line]
    assert compared == ["equal on 1 tensor"] * len(doctor.implementations())
    with pytest.raises((RuntimeError, TypeError)) as error:
        torch.empty(1, device="ve")  # not built into this torch
    outcome = doctor._check("ve torch operations", torch.device("ve"), "", torch.uint8)
    first = str(error.value).splitlines()[0]
    assert (outcome.cases, outcome.error, outcome.skipped) == (0, "", first)
    assert doctor._outcome_line(outcome).endswith(f"uint8           skipped: {first}")


# A machine's facts: the changes to those of a CPU with everything in order, and the lines that tell of them.
HEALTHY: dict[str, Any] = {
    "nanwatch": {"version": "1.0", "path": "/lib/nanwatch"},
    "python": "3.12.1",
    "platform": "Linux",
    "torch": {"version": "2.13.0", "cuda": None, "hip": None, "missing": []},
    "compiled": {
        "loaded": True,
        "reason": "",
        "stable_operators": False,
        "cuda": False,
        "build": {"torch": "2.13.0", "compiler": "g++ 12"},
        "info": {"torch": "2.13.0"},
    },
    "cpu": {
        "capability": "avx2",
        "capabilities": ["baseline", "avx2"],
        "warning": "",
        "threads": 8,
        "openmp": ["/usr/lib/libgomp.so.1"],
    },
    "devices": [{"device": "cpu", "name": "EPYC", "implementation": "native (avx2)", "reason": ""}],
}
OTHERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "a GPU": (
        {
            "torch": {"cuda": "13.0"},
            "compiled": {"cuda": True, "build": {"cuda": "13.0", "cuda_archs": "sm_90"}},
            "devices": [{"device": "cuda:0", "name": "H200", "implementation": "native", "reason": ""}],
        },
        [
            "torch           2.13.0, CUDA 13.0",
            "  CUDA kernels  CUDA 13.0, sm_90",
            "cuda:0          native   [H200]",
        ],
    ),
    "a newer torch without a name": (
        {"torch": {"missing": ["torch._C._gone"]}},
        ["  WARNING       nanwatch uses private names of torch, seen in 2.13, that this version lacks: torch._C._gone"],
    ),
    "a GPU of AMD": ({"torch": {"hip": "6.4"}}, ["torch           2.13.0, ROCm 6.4"]),
    "no nvcc": (
        {"compiled": {"build": {"cuda_reason": "there is no nvcc"}}},
        ["  CUDA kernels  no: there is no nvcc"],
    ),
    "an unknown build": (
        {"compiled": {"build": {}, "info": {}}},
        ["  built with    torch unknown, compiler unknown"],
    ),
    "not built": (
        {"compiled": {"loaded": False, "reason": "g++ failed"}},
        [
            "compiled part   MISSING: g++ failed",
            "  without it    every answer is the same, each takes 10 to 100 times longer",
            f"  to get it     {_extension.REBUILD}   (in the source tree, after curing the reason)",
        ],
    ),
    "another torch": (
        {"compiled": {"loaded": False, "reason": "made for torch 2.9", "stable_operators": True}},
        ["  in its place  the kernels are compiled (stable ABI); the recorder is not"],
    ),
    "switched off": (
        {"compiled": {"loaded": False, "reason": "switched off by NANWATCH_EXT=0"}},
        ["compiled part   MISSING: switched off by NANWATCH_EXT=0"],
    ),
    "a held level": (
        {"cpu": {"warning": "NANWATCH_CPU=avx99 is unknown"}},
        ["  WARNING       NANWATCH_CPU=avx99 is unknown"],
    ),
    "two runtimes": (
        {"cpu": {"openmp": ["/a/libgomp.so", "/b/libiomp5.so"]}},
        [
            "threads         8, OpenMP: /a/libgomp.so, /b/libiomp5.so",
            "  WARNING       several OpenMP runtimes are loaded: their threads compete for the same cores",
        ],
    ),
    "no runtime": ({"cpu": {"openmp": []}}, ["threads         8, OpenMP: none found"]),
    "no kernels": (
        {"devices": [{"device": "mps", "name": "", "implementation": "torch operations", "reason": "no kernels"}]},
        ["mps             torch operations: no kernels   []"],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "told"), OTHERS.values(), ids=OTHERS)
def test_the_text_tells_what_differs_on_another_machine(changes, told):
    """Each fact has its line, and on a machine where everything is in order none of them appears."""
    machine = copy.deepcopy(HEALTHY)
    for part, values in changes.items():
        machine[part] = values if isinstance(values, list) else machine[part] | values
    usual, lines = doctor._lines(HEALTHY), doctor._lines(machine)
    assert [line for line in told if line not in lines] == []
    assert [line for line in told if line in usual] == []
    # Whoever has switched it off knows how to get it back.
    is_missing = not machine["compiled"]["loaded"] and "switched off" not in machine["compiled"]["reason"]
    assert any("to get it" in line for line in lines) == is_missing


def test_without_proc_the_rest_is_told(monkeypatch):
    """On macOS neither the CPU's model nor the loaded libraries can be read there."""

    def unreadable(*_: Any, **__: Any) -> str:
        raise FileNotFoundError("/proc")

    monkeypatch.setattr(doctor.Path, "read_text", unreadable)
    found = doctor.facts()
    assert found["cpu"]["openmp"] == []
    assert found["devices"][0]["name"] in (doctor.platform.processor(), doctor.platform.machine())


def test_each_device_of_a_machine_is_told_with_what_serves_it(monkeypatch):
    """Two GPUs, whose kernels a build for the CPU does not have, and Intel's and Apple's, for which there are none."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"H200 number {device.index}")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 1)
    monkeypatch.setattr(
        doctor, "_has_kernel", lambda device: device.type == "cpu" and _extension.C is not None
    )
    monkeypatch.setitem(_extension.build, "cuda_reason", "there is no nvcc")
    devices = {one["device"]: one for one in doctor.facts()["devices"]}
    assert list(devices) == ["cpu", "cuda:0", "cuda:1", "mps", "xpu:0"]
    assert devices["cuda:1"]["name"] == "H200 number 1"
    names = [name for name, _, _ in doctor.implementations() if not name.startswith("cpu")]
    assert names == [f"{device} torch operations" for device in ("cuda:0", "cuda:1", "mps", "xpu:0")]
    if _extension.C is None:
        assert {one["reason"] for one in devices.values()} == {_extension.reason}
    else:
        assert devices["cuda:0"]["reason"] == "there is no nvcc"
        assert devices["xpu:0"]["reason"] == "there are no native kernels for xpu"
    monkeypatch.setattr(_extension, "C", None)
    monkeypatch.setattr(_extension, "reason", "g++ failed")
    found = doctor.facts()
    assert not found["compiled"]["loaded"]
    assert found["cpu"]["capability"] is None
    assert found["devices"][2]["reason"] == "g++ failed"
    assert doctor._cuda_part(found["compiled"]) == "no"
