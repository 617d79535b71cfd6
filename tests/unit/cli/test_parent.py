"""`nanwatch run --parent`: the script's end as only its parent can know it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from nanwatch.blackbox.story import read as read_black_box
from support.black_boxes import needs_box
from support.processes import environment

pytestmark = needs_box

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


def _start(folder: Path, how: str, *, ignores_children: bool = False) -> subprocess.Popen[str]:
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
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN) if ignores_children else None,
    )


def test_a_killed_script_is_told(tmp_path: Path) -> None:
    """In its black box and on stderr. The parent ends as the script did."""
    process = _start(tmp_path, "killed")
    _, said = process.communicate(timeout=120)
    (path,) = tmp_path.glob("out/blackbox/*")
    report = read_black_box(path)
    assert process.returncode == -signal.SIGKILL
    assert (report.end, report.signal, report.exit_status) == ("signal", signal.SIGKILL, None)
    assert [one.class_name for thread in report.threads for one in thread.calls] == ["Ends"]
    assert f"SIGKILL ended the script; `nanwatch show {path}`" in said


@pytest.mark.parametrize("ignores_children", [False, True])
def test_a_status_is_the_scripts(ignores_children: bool, tmp_path: Path) -> None:
    """The file has it too. Whoever started the parent may have let it ignore SIGCHLD."""
    process = _start(tmp_path, "returns", ignores_children=ignores_children)
    process.communicate(timeout=120)
    (path,) = tmp_path.glob("out/blackbox/*")
    assert (process.returncode, read_black_box(path).exit_status) == (5, 5)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_to_the_parent_reaches_the_script(number: signal.Signals, tmp_path: Path) -> None:
    """SIGTERM is passed on, and the script's own handler decides. SIGKILL leaves no orphan."""
    process = _start(tmp_path, "waits")
    assert process.stdout is not None
    assert process.stdout.readline() == "waits\n"
    os.kill(process.pid, number)
    process.communicate(timeout=120)  # ends when nobody has its output any more
    assert process.returncode == {signal.SIGTERM: 7, signal.SIGKILL: -9}[number]
