"""Faults of `judge_blackbox.py`, each of which happens inside the process that is judged."""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import _box_account
import _box_program
import torch

import nanwatch

_THROWS = """
#include <stdexcept>
#include <thread>
extern "C" void throw_in_thread() { std::thread([] { throw std::runtime_error("thrown"); }).join(); }
"""
IN_MODULE = ("before", "after", "backward")
EVERYWHERE = (*IN_MODULE, "step", "data")
_library: ctypes.CDLL | None = None


def compile_throwing() -> bool:
    """Compile the library whose thread throws; False where there is no compiler."""
    global _library
    folder = tempfile.mkdtemp()
    try:
        Path(folder, "throws.cpp").write_text(_THROWS)
        subprocess.run(
            ["g++", "-shared", "-fPIC", "-o", "throws.so", "throws.cpp"],
            cwd=folder,
            check=True,
            capture_output=True,
        )
        _library = ctypes.CDLL(str(Path(folder, "throws.so")))
    except (OSError, subprocess.CalledProcessError):
        return False
    finally:
        shutil.rmtree(folder)
    return True


class Fault:
    """The fault of one trial. Called with each place that the program comes to."""

    def __init__(self, trial: _box_account.Trial, account: _box_account.Account) -> None:
        self.trial = trial
        self.batch = -1
        self._account = account
        self._kind = KINDS[trial.fault]
        self._first = self._kind.first

    def __call__(self, module: int, place: str) -> None:
        trial = self.trial
        if module not in (-1, trial.module):
            return
        if self._first is not None and self.batch == 0 and place == "before":
            self._first(self)
            self._first = None
        if place == trial.place and self.batch == trial.batch and not self._account.is_met:
            self._account.meet()
            self._kind.act(self)

    def before_watch(self) -> None:
        if self._kind.before_watch is not None:
            self._kind.before_watch()

    def after_watch(self) -> None:
        if self._kind.after_watch is not None:
            self._kind.after_watch()

    @property
    def boxes(self) -> list[Path]:
        """Return the files of this process."""
        return [*Path(self.trial.folder, "blackbox").glob(f"*-{os.getpid()}-*.blackbox")]


@dataclass(frozen=True)
class Kind:
    """Kind of fault: its action, the places where it can happen, and the end that the black box then tells.

    `first` happens in a module of batch 0, and `act` at the place of the trial. `end` is the end of the process by the
    black box. `box` is "named" where its file opens and names the module that ran, "noted" where a note of it does,
    "opens" where it only opens, "none" where there is none but one warning, "any" where it may be unreadable.
    """

    act: Callable[[Fault], None]
    end: str = "unknown"
    box: str = "named"
    places: tuple[str, ...] = EVERYWHERE
    is_threaded: bool = True
    first: Callable[[Fault], None] | None = None
    before_watch: Callable[[], None] | None = None
    after_watch: Callable[[], None] | None = None


def _kill(_: Fault) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _read_null(_: Fault) -> None:
    ctypes.string_at(0)


def _throw(_: Fault) -> None:
    assert _library is not None
    _library.throw_in_thread()


def _abort(_: Fault) -> None:
    os.abort()


def _exit(_: Fault) -> None:
    os._exit(7)


def _terminate(_: Fault) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def _handle_terminate() -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        print("handled", number, flush=True)
        sys.exit(5)

    signal.signal(signal.SIGTERM, handle)


def _use_memory(fault: Fault) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + (64 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    if fault.trial.seed % 2:
        bytearray(1 << 28)
    torch.empty(1 << 28)


def _fill_disk(fault: Fault) -> None:
    with contextlib.suppress(OSError), open(Path(fault.trial.folder, "filler"), "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))


def _remove(fault: Fault) -> None:
    for path in fault.boxes:
        os.link(path, path.with_name(f"kept-{path.name}"))
        path.unlink()


def _cut_off(fault: Fault) -> None:
    for path in fault.boxes:
        os.truncate(path, random.Random(fault.trial.seed).choice((0, 4096, random.randrange(8 << 20))))


def _fork(fault: Fault) -> None:
    child = os.fork()
    if child == 0:
        model = _box_program.build()
        if fault.trial.seed % 2:
            nanwatch.watch(model, output_dir=fault.trial.folder)
        model(torch.ones(4, 16))
        ctypes.string_at(0) if fault.trial.seed % 4 > 1 else os._exit(3)
    print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _execute(fault: Fault) -> None:
    done = subprocess.run(["/bin/sh", "-c", "kill -SEGV $$"])
    print("child", done.returncode, flush=True)


def _nothing(_: Fault) -> None:
    """The parent kills, or the folder is one that refuses."""


KINDS = {
    "SIGKILL": Kind(_kill),
    "SIGKILL by the parent": Kind(_nothing, places=("data",)),
    "SIGSEGV": Kind(_read_null, "signal"),
    "abort()": Kind(_abort, "signal"),
    "os._exit": Kind(_exit),
    "C++ exception": Kind(_throw, "signal"),
    "SIGTERM": Kind(_terminate, "signal"),
    "SIGTERM, own handler": Kind(
        _terminate, "signal exit", "opens", is_threaded=False, before_watch=_handle_terminate
    ),
    "SIGTERM, handler later": Kind(
        _terminate, "exit", "opens", is_threaded=False, after_watch=_handle_terminate
    ),
    "SIGSEGV, faulthandler": Kind(_read_null, "signal", before_watch=faulthandler.enable),
    "SIGSEGV, faulthandler later": Kind(_read_null, "signal", after_watch=faulthandler.enable),
    "RLIMIT_AS": Kind(_use_memory, "exception", "noted", is_threaded=False),
    "disk becomes full": Kind(_kill, first=_fill_disk),
    "disk is full": Kind(_nothing, box="none"),
    "RLIMIT_FSIZE": Kind(_nothing, box="none"),
    "read-only folder": Kind(_nothing, box="none"),
    "file removed": Kind(_kill, first=_remove),
    "file cut off": Kind(_cut_off, box="any", is_threaded=False),
    "fork": Kind(_kill, first=_fork),
    "fork and exec": Kind(_kill, first=_execute),
    "two jobs": Kind(_kill),
    "none": Kind(_nothing, "exit", "opens", is_threaded=False),
}
