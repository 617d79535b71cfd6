"""The commands as filters, the doctor, and what the loader says when the compiled part is missing."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.__main__ import main
from nanwatch.cli.commands import COMMANDS
from nanwatch.numerics import _extension
from support.processes import environment, forked, user_environment

CUT = 141  # 128 + SIGPIPE: what a shell says of a filter that was cut


def unread(*arguments: str) -> tuple[int, str]:
    """Return the exit status and stderr of the command, whose stdout is a pipe that has no reader."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = forked("-m", "nanwatch", *arguments, env=user_environment(PYTHONUNBUFFERED=""), stdout=writer)
    finally:
        os.close(writer)
    return done.returncode, done.stderr


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A saved report."""
    model = nn.Identity()
    with nanwatch.watch(model) as w:
        model(torch.ones(2))
        (tmp_path / "report.json").write_text(w.report().to_json())
    return tmp_path / "report.json"


def test_a_command_ends_quietly(saved: Path) -> None:
    assert unread("show", str(saved), "--json") == (CUT, "")


@pytest.mark.slow
def test_what_the_terminal_cannot_show_is_an_escape(saved: Path) -> None:
    """An arrow, which reports of skipped steps have, in an encoding without it."""
    report = json.loads(saved.read_text())
    report["frames"][0]["name"] = "a→b"
    saved.write_text(json.dumps(report))
    command = [sys.executable, "-m", "nanwatch", "show", str(saved)]
    done = subprocess.run(command, env=environment(PYTHONIOENCODING="ascii"), capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"a\\u2192b" in done.stdout


@pytest.mark.parametrize("name", ["", *sorted(COMMANDS)])
def test_the_usage_names_the_program(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`nanwatch`, also where it was started as `python -m nanwatch`; every option says what it does."""
    with pytest.raises(SystemExit) as left:
        main([*([name] if name else []), "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: {f'nanwatch {name}'.strip()} ")
    assert "python -m nanwatch" not in shown


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["scan", "--agianst=b", "a"], "close names: --against"),
        (["run", "--moduls", "x", "train.py"], "close names: --modules"),
        (["doctor", ""], "error: unrecognized arguments: "),
    ],
)
def test_a_misspelt_word_names_what_is_meant(arguments, hint, capsys):
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert hint in capsys.readouterr().err


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
