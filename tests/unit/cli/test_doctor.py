"""`python -m nanwatch`, and what the loader says when the compiled part is missing."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

import nanwatch
from nanwatch.__main__ import main
from nanwatch.numerics import _extension
from support.processes import forked, user_environment

PACKAGE = Path(nanwatch.__file__).parent

needs_extension = pytest.mark.skipif(_extension.C is None, reason=f"no compiled part: {_extension.reason}")


def run(*arguments: str, place: Path = PACKAGE.parent, **changes: str) -> subprocess.CompletedProcess[str]:
    return forked(*arguments, env=user_environment(PYTHONPATH=str(place), **changes), imported=False)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with a copy of the package, to spoil."""
    shutil.copytree(PACKAGE, tmp_path / "nanwatch", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def reason_in(place: Path) -> str:
    done = run("-m", "nanwatch", "--json", place=place)
    assert done.returncode == 0, done.stderr
    compiled = json.loads(done.stdout)["compiled part"]
    assert compiled.startswith("MISSING: ")
    return compiled


@pytest.mark.parametrize("name", [["doctor"], []])
def test_the_text_names_versions_and_devices(name, capsys):
    """One fact each in lines for a person, the same as JSON; the command's name may be left out."""
    assert main(name) == 0
    out = capsys.readouterr().out
    assert main([*name, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [line[:16].strip() for line in out.splitlines()] == [*document]
    assert document["torch"].startswith(f"{torch.__version__}, ")
    assert (document["compiled part"] == "loaded") == (_extension.C is not None)
    assert document["cpu"].startswith("native" if _extension.C is not None else "torch operations")


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
    assert f"built with      torch {_extension.C.build_info()['torch']}," in done.stdout
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
    digest = hashlib.sha256(stub.read_bytes()).hexdigest()
    (copied / "nanwatch" / "_build.json").write_text(json.dumps({"stub": digest}))
    if is_stale:
        stub.write_text(stub.read_text().replace("# headers: ", "# headers: 0"))
    program = "import nanwatch as n, torch as t; m = t.nn.ReLU(); w = n.watch(m); m(t.ones(2)); print(len(w.frames))"
    done = run("-c", program, place=copied)
    assert done.stdout == "1\n"
    words = "Reason: it is older than the Python sources, whose records or calls are others by now; rebuild it: `pip"
    assert (words in done.stderr) == is_stale
