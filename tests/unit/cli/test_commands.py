"""The commands as filters: what they do when nobody reads what they print."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.__main__ import main
from nanwatch.cli.commands import COMMANDS
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
