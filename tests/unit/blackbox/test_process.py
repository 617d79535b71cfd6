"""The black box of a process: where it lies, how long, what it says of a hang and of the end."""

import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from nanwatch.blackbox import process
from nanwatch.blackbox.process import process_box
from nanwatch.blackbox.reader import read as read_black_box
from support.black_boxes import black_box, needs_box
from support.processes import environment, forked, until
from support.watching import watch

pytestmark = needs_box


def test_a_hang_is_noted_once_with_all_stacks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """In the file and in the log. A second one, after a call, is noted too."""
    release = threading.Event()

    def stands_still() -> None:
        release.wait()

    model = nn.Linear(2, 2)
    helper = threading.Thread(target=stands_still, name="helper", daemon=True)
    with (
        caplog.at_level(logging.WARNING, "nanwatch"),
        black_box(tmp_path, stall_timeout=0.1) as box,
        watch(model, black_box=True),
    ):
        helper.start()
        model(torch.ones(1, 2))
        until(lambda: read_black_box(box.path).notes)
        box._ended.wait(1.5)  # no second note
        release.set()
        helper.join()
        (note,) = (report := read_black_box(box.path)).notes
        model(torch.ones(1, 2))
        until(lambda: len(read_black_box(box.path).notes) == 2)
    assert report.calls[0].ago > 0.1
    assert any("in stands_still" in place for place in note["stacks"]["helper"])
    assert any("in test_a_hang" in place for place in note["stacks"]["MainThread"])
    assert sum(str(box.path) in record.getMessage() for record in caplog.records) == 2


def test_a_forked_child_leaves_the_parents_file_alone(tmp_path: Path) -> None:
    """Its calls are in none before it watches, and then in its own."""
    model = nn.Linear(2, 2)
    with black_box(tmp_path) as box, watch(model, black_box=True):
        pid = os.fork()
        if pid == 0:
            try:
                model(torch.ones(1, 2))
                assert process_box() is None
                second = nn.Linear(2, 2)
                watch(second, output_dir=tmp_path)
                second(torch.ones(1, 2))
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert read_black_box(box.path).num_calls == 0
    (path,) = tmp_path.glob(f"blackbox/*-{pid}-*")
    assert read_black_box(path).num_calls == 1


_TRAINS = """
import atexit, os, sys, time, torch, nanwatch
{before}
model = torch.nn.Linear(2, 2)
nanwatch.watch(model, black_box=True)
model(torch.ones(1, 2))
{after}
"""


def test_the_status_of_the_process_decides_about_the_file(tmp_path: Path) -> None:
    """Also what comes after Python's own end of it, as `os.abort` here. Only a status of 0 removes the file."""
    programs = [("", ""), ("", "sys.exit(3)"), ("atexit.register(os.abort)", "")]
    processes = []
    for number, (before, after) in enumerate(programs):
        # Not forked: that server's children end without the exit of C.
        command = [sys.executable, "-c", _TRAINS.format(before=before, after=after)]
        env = environment(XDG_STATE_HOME=str(tmp_path / str(number)))
        processes.append(subprocess.Popen(command, env=env, stderr=subprocess.DEVNULL))
    ends = []
    for number, child in enumerate(processes):
        child.wait(120)
        reports = map(read_black_box, tmp_path.glob(f"{number}/nanwatch/*"))
        ends.append([(report.end, report.exit_status) for report in reports])
    assert ends == [[], [("exit", 3)], [("signal", None)]]


def test_a_file_that_was_cut_off_harms_no_thread(tmp_path: Path) -> None:
    """Neither the one that calls modules nor the one that writes once a second."""
    cut = "from nanwatch.blackbox.process import process_box\nos.truncate(process_box().path, 0)\ntime.sleep(1.2)"
    code, env = _TRAINS.format(before="", after=cut), environment(XDG_STATE_HOME=str(tmp_path))
    done = forked("-c", code, env=env)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_script_of_nanwatch_run_ends_by_its_exception(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import torch\ntorch.nn.Linear(2, 2)(torch.ones(2)).sum().backward()\nraise KeyError\n")
    done = forked("-m", "nanwatch", "run", "--output-dir", str(tmp_path / "out"), str(script))
    assert done.returncode == 1
    (path,) = tmp_path.glob("out/blackbox/*")
    assert read_black_box(path).end == "exception"


def test_a_process_of_multiprocessing_ends_by_itself(tmp_path: Path) -> None:
    """Its end runs no function of atexit."""

    def train() -> None:
        model = nn.Linear(2, 2)
        watch(model, output_dir=tmp_path)
        model(torch.ones(1, 2))

    child = multiprocessing.get_context("fork").Process(target=train)
    child.start()
    child.join(60)
    assert child.exitcode == 0
    (path,) = tmp_path.glob("blackbox/*")
    assert read_black_box(path).end == "exit"


def test_a_folder_that_refuses_gives_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_process", None)
    monkeypatch.setattr(process, "_has_failed", False)
    monkeypatch.setattr(process, "state_folder", lambda: Path("/proc/none"))
    model = nn.Linear(2, 2)
    with pytest.warns(RuntimeWarning, match="nanwatch keeps no black box"):
        watch(model, black_box=True).stop()
    with warnings.catch_warnings(), watch(model, black_box=True):
        warnings.simplefilter("error")
        assert model(torch.ones(1, 2)).isfinite().all()


def test_old_files_go(tmp_path: Path) -> None:
    """A process that runs writes into its own once a second."""
    for name, seconds in (("a.blackbox", 0), ("b.blackbox", time.time()), ("notes.txt", 0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (seconds, seconds))
    process._prune(tmp_path)
    assert {*os.listdir(tmp_path)} == {"b.blackbox", "notes.txt"}
