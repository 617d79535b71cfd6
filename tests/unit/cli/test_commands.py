"""The commands as filters: what they do when nobody reads what they print."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.__main__ import main
from nanwatch.cli.commands import COMMANDS
from nanwatch.util.imports import needed
from support.paths import ROOT
from support.processes import PYTHONPATH, environment, forked

CUT = 141  # 128 + SIGPIPE: what a shell says of a filter that was cut


def unread(
    *arguments: str, buffered: bool = True, of: tuple[str, ...] = ("-m", "nanwatch")
) -> tuple[int, str]:
    """Exit status and stderr of the command of that program, whose stdout is a pipe that has no reader."""
    reader, writer = os.pipe()
    os.close(reader)
    env = {name: value for name, value in os.environ.items() if not name.startswith("NANWATCH")}
    env |= {"PYTHONPATH": PYTHONPATH}
    env.pop("PYTHONUNBUFFERED", None)
    if not buffered:
        env["PYTHONUNBUFFERED"] = "1"
    try:
        if buffered:
            done = forked(*of, *arguments, env=env, stdout=writer)
        else:
            command = [sys.executable, *of, *arguments]
            done = subprocess.run(
                command, env=env, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120
            )
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


@pytest.mark.parametrize("argument", ["--json", pytest.param("--help", marks=pytest.mark.slow)])
def test_a_command_ends_quietly(argument: str, saved: Path) -> None:
    """The same for a sub-command."""
    assert unread("show", str(saved), argument) == (CUT, "")


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("utf-8", marks=pytest.mark.slow)])
def test_what_the_terminal_cannot_show_is_an_escape(encoding: str, saved: Path) -> None:
    """An arrow, which reports of skipped steps have, in an encoding without it."""
    report = json.loads(saved.read_text())
    report["frames"][0]["name"] = "a→b"
    saved.write_text(json.dumps(report))
    command = [sys.executable, "-m", "nanwatch", "show", str(saved)]
    done = subprocess.run(
        command, env=environment(PYTHONIOENCODING=encoding), capture_output=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert ("a→b".encode() if encoding == "utf-8" else b"a\\u2192b") in done.stdout


@pytest.mark.slow
def test_without_any_stdout_a_command_ends_well(saved: Path) -> None:
    """Closed from the start, as by `>&-`: there is nobody to print for, and no error."""
    script = f'"{sys.executable}" -m nanwatch show "{saved}" >&-'
    done = subprocess.run(
        ["sh", "-c", script], env=environment(), stderr=subprocess.PIPE, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_a_pipe_that_breaks_in_the_users_script_is_the_scripts(tmp_path: Path) -> None:
    """`run` ends as the script would without it: with its traceback, for all that it had still to do."""
    script = tmp_path / "script.py"
    script.write_text("print('x', flush=True)\n")
    status, errors = unread("run", str(script))
    assert status == unread(str(script), of=())[0] != CUT
    assert "BrokenPipeError" in errors
    assert not COMMANDS["run"].only_prints


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
    ("arguments", "flag"),
    [(["scan", "--agianst=b", "a"], "--against"), (["run", "--moduls", "x", "train.py"], "--modules")],
)
def test_an_unknown_flag_names_close_ones(
    arguments: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert f"close names: {flag}" in capsys.readouterr().err


def test_a_missing_package_is_named_with_what_can_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """nanwatch is on no index: the package itself, or the extra of a clone."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError) as error:
        needed("pyarrow.parquet", "trace=", "trace")
    told = str(error.value)
    assert (
        "pip install pyarrow, or in a clone of nanwatch pip install --no-build-isolation '.[trace]'" in told
    )
    assert "'nanwatch[" not in told


def test_the_table_of_exit_statuses_has_those_of_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    """One row a command, a cell for each status that its help names."""
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8").partition("## Exit statuses")[2]
    lines = [line for line in page.partition("\n\n")[2].partition("\n\n")[0].splitlines() if line]
    rows = {cells[1].strip(" `"): cells[2:6] for line in lines[2:] if (cells := line.split("|"))}
    assert sorted(rows) == sorted(COMMANDS)
    for name, cells in rows.items():
        with pytest.raises(SystemExit):
            COMMANDS[name].run(["--help"])
        words = capsys.readouterr().out.partition("examples:")[0].rpartition("exit status")[2]
        told = {int(number) for number in re.findall(r"\b[0-3]\b", words.partition("\n\n")[0])}
        assert told == {status for status, cell in enumerate(cells) if cell.strip()}, name
