"""Black boxes of whole programs, and how they ended."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nanwatch import watch
from nanwatch.blackbox.story import BlackBoxReport
from nanwatch.blackbox.story import read as read_black_box
from support.black_boxes import needs_box
from support.processes import environment, forked

pytestmark = needs_box

TRAINS = """
import torch, nanwatch, sys
model = torch.nn.Sequential(torch.nn.Linear(2, 2))
nanwatch.watch(model, output_dir=sys.argv[1] or None, black_box=True)
model(torch.ones(1, 2))
"""


def trained(folder: Path, code: str, *, given: bool = True) -> tuple[Any, list[BlackBoxReport]]:
    """Run a program that has watched a model; return how it ended, and the black boxes that it left."""
    done = forked(
        "-c",
        TRAINS + code,
        str(folder) if given else "",
        env=environment(XDG_STATE_HOME=str(folder / "state")),
    )
    paths = sorted((folder / "blackbox" if given else folder / "state" / "nanwatch").glob("*"))
    return done, [read_black_box(path) for path in paths]


def test_a_program_that_ends_well_leaves_no_file_of_its_own_accord(tmp_path: Path) -> None:
    """In the user's folder; one in `output_dir` stays."""
    done, boxes = trained(tmp_path, "", given=False)
    assert (done.returncode, boxes) == (0, [])
    done, boxes = trained(tmp_path, "")
    assert [box.end for box in boxes] == ["exit"]
    assert boxes[0].facts["argv"]


def test_a_script_of_nanwatch_run_ends_by_its_exception(tmp_path: Path) -> None:
    """Though the command catches it."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch\nm = torch.nn.Linear(2, 2)\nm(torch.ones(1, 2)).sum().backward()\nraise KeyError\n"
    )
    done = forked("-m", "nanwatch", "run", "--output-dir", str(tmp_path / "out"), str(script))
    assert done.returncode == 1
    (path,) = tmp_path.glob("out/blackbox/*")
    assert read_black_box(path).end == "exception"


def test_a_file_that_was_cut_off_harms_no_thread(tmp_path: Path) -> None:
    """Neither the one that calls modules nor the one that writes once a second."""
    code = """
import os, pathlib, time
(path,) = pathlib.Path(sys.argv[1], "blackbox").glob("*")
os.truncate(path, 0)
time.sleep(2.1)
"""
    done = forked("-c", TRAINS + code, str(tmp_path), env=environment())
    assert (done.returncode, done.stderr) == (0, "")


def test_a_process_of_multiprocessing_ends_by_itself(tmp_path: Path) -> None:
    """Its end runs no function of atexit."""
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_train, args=(tmp_path,))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    (path,) = tmp_path.glob("blackbox/*")
    assert read_black_box(path).end == "exit"


def _train(folder: Path) -> None:
    model = nn.Linear(2, 2)
    watch(model, output_dir=folder)
    model(torch.ones(1, 2))
