"""Scripts run in this process or below a parent, and options that stand behind them."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nanwatch.blackbox.story import read as read_black_box
from nanwatch.cli.script import add_script
from support.black_boxes import needs_box
from support.processes import environment


def test_all_behind_the_script_is_its_own() -> None:
    """Also what looks like an option of the command."""
    parser = argparse.ArgumentParser()
    add_script(parser)
    parser.add_argument("--every")
    given = parser.parse_args(["--every", "3", "train.py", "--every", "5", "-m", "x"])
    assert (given.target, given.every, given.m, given.arguments) == (
        "train.py",
        "3",
        False,
        ["--every", "5", "-m", "x"],
    )


# Below a parent

_SCRIPT = """
import os, signal, sys, time, torch
class Ends(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        if sys.argv[1] == "waits":
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
            print("waits", flush=True)
            time.sleep(60)
        if sys.argv[1] == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return y
Ends(2, 2)(torch.ones(1, 2))
sys.exit(5)
"""


def _start(folder: Path, how: str) -> subprocess.Popen[str]:
    script = folder / "train.py"
    script.write_text(_SCRIPT)
    command = "-m", "nanwatch", "run", "--parent", "--output-dir", str(folder / "out"), str(script), how
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *command],
        env=environment(),
        stdout=pipe,
        stderr=pipe,
        text=True,
    )


@needs_box
def test_a_killed_script_is_told(tmp_path: Path) -> None:
    """In its black box and on stderr. The parent ends as the script did."""
    process = _start(tmp_path, "killed")
    _, errors = process.communicate(timeout=120)
    (path,) = tmp_path.glob("out/blackbox/*")
    report = read_black_box(path)
    assert process.returncode == -signal.SIGKILL
    assert (report.end, report.signal, report.exit_status) == ("signal", signal.SIGKILL, None)
    assert [call.class_name for thread in report.threads for call in thread.calls] == ["Ends"]
    assert f"SIGKILL ended the script; `nanwatch show {path}`" in errors


@needs_box
@pytest.mark.slow
def test_a_status_is_the_scripts(tmp_path: Path) -> None:
    """The file has it too."""
    process = _start(tmp_path, "returns")
    process.communicate(timeout=120)
    (path,) = tmp_path.glob("out/blackbox/*")
    assert (process.returncode, read_black_box(path).exit_status) == (5, 5)


@needs_box
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_parent_reaches_the_script(number: signal.Signals, tmp_path: Path) -> None:
    """SIGTERM is passed on, and the script's own handler decides. SIGKILL leaves no orphan."""
    process = _start(tmp_path, "waits")
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    os.kill(process.pid, number)
    process.communicate(timeout=120)  # ends when nobody has its output any more
    assert process.returncode == {signal.SIGTERM: 7, signal.SIGKILL: -9}[number]
