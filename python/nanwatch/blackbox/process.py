"""Black box of this process: its file, what is known of the process, signs of life, hangs, and the end.

The compiled recorders write the calls. A thread of this module writes once a second that the process lives, its memory
and where Python is, and at a hang the stacks of all threads.
"""

from __future__ import annotations

import atexit
import itertools
import json
import logging
import multiprocessing
import multiprocessing.util
import os
import platform
import socket
import sys
import threading
import time
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..numerics import _extension
from ..util.job import rank_and_world_size, started_at
from ..util.messages import suppressing, warn_user
from ..util.program import is_library
from .reader import SUFFIX

_LEAST_STALL = 300.0  # seconds
_SLOWER = 10
_INNERMOST = 3  # functions in a sample
_DEEPEST = 64
_MOST_WORDS, _LONGEST_WORD = 100, 200  # of the command
_WEEK = 7 * 86400
_OWN = os.path.dirname(os.path.dirname(__file__)) + os.sep
_log = logging.getLogger("nanwatch")
_lock = threading.Lock()


class ProcessBox:
    """The black box of this process, which its first Watch opens.

    `path` is its file, which stays after a good end if it `is_kept`. `num_watches` counts the watches that have not
    stopped. `stall_timeout` is the time without a call that counts as a hang, None for the default. `error` is the
    exception of a script, which `nanwatch run` catches.
    """

    def __init__(self, compiled: ModuleType, path: Path, *, is_kept: bool) -> None:
        self.path = path
        self.stall_timeout: float | None = None
        self.num_watches = 0
        self.error: BaseException | None = None
        self._pid = os.getpid()
        self._box = compiled.open_black_box(str(path), is_kept)
        self._ranks: tuple[int, int] | None = None
        self._ended = threading.Event()
        self._note_facts()
        compiled.catch_signals()
        self._thread = threading.Thread(target=self._live, name="nanwatch-black-box", daemon=True)
        self._thread.start()
        atexit.register(self._exits)
        # Processes of multiprocessing end without the functions of atexit.
        multiprocessing.util.Finalize(None, self._exits, exitpriority=0)

    def note(self, kind: str, **facts: Any) -> None:
        """Write what happened: `kind` and facts for JSON."""
        line = json.dumps({"kind": kind, "time": time.time(), **facts}, default=str)
        self._box.add_note(line + "\n")

    def _note_facts(self) -> None:
        self._ranks = rank_and_world_size()
        self.note(
            "facts",
            host=socket.gethostname(),
            started=started_at(os.getpid()),
            rank=self._ranks[0],
            world_size=self._ranks[1],
            argv=[word[:_LONGEST_WORD] for word in sys.orig_argv[:_MOST_WORDS]],
            **_extension.versions(),
            device=torch.cuda.get_device_name() if torch.cuda.is_initialized() else platform.machine(),
        )

    def _live(self) -> None:
        is_noted = False  # the hang that lasts
        previous = longest = 0.0  # times without a call: a second ago, and the longest that ended
        while not self._ended.wait(1.0):
            with suppressing("the black box gave no sign of life"):
                if rank_and_world_size() != self._ranks:  # torch.distributed was initialized
                    self._note_facts()
                idle = self._box.pulse(_memory())
                has_called = idle < previous  # since a second ago
                longest = max(longest, previous if has_called else 0.0)
                previous = idle
                self._box.add_sample("\n".join(_chosen(_places(threading.main_thread()))))
                default = max(_LEAST_STALL, _SLOWER * longest)
                limit = default if self.stall_timeout is None else self.stall_timeout
                is_interactive = hasattr(sys, "ps1")  # where somebody thinks between two calls
                hangs = self.num_watches > 0 and 0 < limit <= idle and not is_interactive
                if hangs and (has_called or not is_noted):
                    self._note_hang(idle)
                is_noted = hangs

    def _note_hang(self, idle: float) -> None:
        threads = (thread for thread in threading.enumerate() if thread is not self._thread)
        stacks = {thread.name: _places(thread) for thread in threads}
        self.note("stall", seconds=round(idle), stacks=stacks)
        where = " < ".join(_chosen(stacks.get(threading.main_thread().name, [])))
        seen = f"no call of a watched module has begun or ended for {idle:.0f} s"
        show = f"`nanwatch show {self.path}` has the module and the stacks of all threads"
        _log.warning("nanwatch: %s; the main thread is in %s. %s", seen, where, show)

    def _exits(self) -> None:
        """Note that Python ends. The file goes when the process has ended well, unless the user gave a folder."""
        if self._ended.is_set() or os.getpid() != self._pid:
            return
        self._ended.set()
        self._thread.join(5.0)
        # An exception is under way where multiprocessing ends, and left behind where the interpreter does.
        error = self.error or sys.exc_info()[1]
        # Under pytest and IPython sys.last_value is the error of an earlier test or cell.
        if error is None and not hasattr(sys, "ps1") and not {"pytest", "IPython"} & {*sys.modules}:
            error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = None
        if error is not None:
            self.note("exception", error="".join(traceback.format_exception_only(type(error), error))[:2000])
        self._box.exits(error is not None)


_process: ProcessBox | None = None
_has_failed = False


def process_box() -> ProcessBox | None:
    """Return the black box of this process, None before it is opened."""
    return _process


def open_box(output_dir: Path | None, stall_timeout: float | None) -> ProcessBox | None:
    """Return the black box of this process, made at the first call; None where there can be none, with one warning.

    The caller is a watch, and lowers `num_watches` when it stops. In the user's folder for states the files of ended
    processes go after a week.
    """
    global _process, _has_failed
    if _extension.C is None or _has_failed:
        return None
    with _lock:
        if _process is None:
            folder = state_folder() if output_dir is None else output_dir / "blackbox"
            name = f"rank-{rank_and_world_size()[0]}-{socket.gethostname()}-{os.getpid()}-{time.time_ns():x}{SUFFIX}"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if output_dir is None:
                    _prune(folder)
                _process = ProcessBox(_extension.C, folder / name, is_kept=output_dir is not None)
            except (OSError, RuntimeError) as error:
                _has_failed, hint = True, "give a folder with output_dir=, or black_box=False"
                warn_user(f"nanwatch keeps no black box: {error}; {hint}", may_raise=False)
                return None
        _process.num_watches += 1
        if stall_timeout is not None:
            _process.stall_timeout = stall_timeout
    return _process


def state_folder() -> Path:
    """Return the folder of black boxes without `output_dir`: `$XDG_STATE_HOME`, else `~/.local/state`, `/nanwatch`."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "nanwatch"


def _prune(folder: Path) -> None:
    """Remove the files that are a week old. A process that runs writes into its own once a second."""
    with suppressing("an old black box could not be removed"):
        for path in folder.glob(f"*{SUFFIX}"):
            if path.stat().st_mtime < time.time() - _WEEK:
                path.unlink(missing_ok=True)


def _memory() -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def _chosen(places: list[str]) -> list[str]:
    """Return the innermost places, and the innermost in the user's own code."""
    users = [place for place in places[_INNERMOST:] if not is_library(place)]
    return [*places[:_INNERMOST], *users[:1]]


def _places(thread: threading.Thread) -> list[str]:
    """Return the functions of a thread's stack as `file:line in name`, the innermost first, without nanwatch's.

    Keeps no frame, which would keep the user's tensors.
    """
    frame = sys._current_frames().get(thread.ident or 0)
    # walk_stack(None) walks the present thread's.
    stack = () if frame is None else itertools.islice(traceback.walk_stack(frame), _DEEPEST)
    places = ((inner.f_code.co_filename, line, inner.f_code.co_name) for inner, line in stack)
    return [f"{file}:{line} in {name}" for file, line, name in places if not file.startswith(_OWN)]


def _forked() -> None:
    global _process, _lock
    _process, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)
