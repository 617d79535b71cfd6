"""Isolation of re-runs: a forked child process where one can be had, else this process, in both under a clock.

The child is a copy of the process at the moment of the failure, so what it runs changes neither the program's Python
state nor its tensors. Open files, pipes and sockets lead nowhere there, and memory that maps a file is the child's own.
The child sends its result back over a pipe. A parent that waits too long ends the child, with the processes that its
code has started, and goes on. CUDA does not survive a fork, and neither do macOS's frameworks.

The clock ends a run that waits or loops, and notes at which line.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import io
import mmap
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from traceback import walk_stack
from typing import Any, NoReturn

import torch

from ..instrumentation.execution_context import waiting_ends
from ..util.messages import spell
from ..util.program import is_library

_PR_SET_PDEATHSIG = 1
# MAP_PRIVATE, MAP_FIXED, and MAP_NORESERVE, as a file may be larger than the memory.
_PRIVATE_IN_PLACE = 0x4012
_MOST_COPIED = 1 << 26
# Ends a run in the main thread: a wait for a lock lets a signal through. Ignored by default; Windows has none.
_ENDS_RUN: Any = getattr(signal, "SIGURG", None)


def can_fork() -> bool:
    """Return whether a re-run can have a process of its own.

    Not beside a CUDA device: after a backward, also of a model on the CPU, autograd refuses one in a forked child.
    """
    return sys.platform == "linux" and torch.cuda.device_count() == 0


class ChildEndedError(RuntimeError):
    """The child ended without a result. The text says why."""


# In the child: the pipe to the parent. In the program itself None.
_to_parent: Connection | None = None


def send(document: Any = None) -> None:
    """Send the parent what is known so far, and start its clock anew. Does nothing in the program itself."""
    if _to_parent is not None:
        _to_parent.send((document, False))


def is_child() -> bool:
    """Return whether this process is a forked child."""
    return _to_parent is not None


def run_in_child(work: Callable[[], Any], seconds: float) -> Iterator[Any]:
    """Run `work` in a forked child, which has one thread. Yield what it sends, and in the end what it returns.

    These are texts or other plain documents. seconds: how long the child may go without a call of `send`.

    Raises ChildEndedError where no process can be had, or it takes longer or ends without a result, and what a signal
    handler of the program raises meanwhile, after the child has been ended.
    """
    importlib.import_module("torch._dynamo")  # or each child does so anew, which takes a second
    tempfile.gettempdir()  # writes a file, the first time
    drawn = random.getstate()  # which Python seeds anew in a child
    parent, (reading, writing) = os.getpid(), multiprocessing.Pipe(duplex=False)
    with reading:
        with writing, warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
            try:
                child = os.fork()
            except OSError as error:
                raise ChildEndedError(f"no process could be had: {error}") from None
            if child == 0:
                _be_child(work, parent, writing, drawn)
            with suppress(OSError):  # the child does so too: neither knows which of the two is first
                os.setpgid(child, child)
        reason = f"it took longer than {seconds:.0f} s, and was ended"
        try:
            while reading.poll(seconds):
                document, is_last = reading.recv()
                if isinstance(document, ChildEndedError):
                    raise document
                if document is not None:
                    yield document
                if is_last:
                    return
        except (EOFError, OSError):
            reason = "its process ended{}"
        finally:
            status = _end(child)
        raise ChildEndedError(reason.format(status))


def _end(child: int) -> str:
    """End the child and its processes. Return in words how it ended; "" where the program's handler has waited."""
    with suppress(ProcessLookupError, ChildProcessError):
        os.killpg(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return f" with status {status}" if status >= 0 else f" by {signal.Signals(-status).name}"
    return ""


def _be_child(work: Callable[[], Any], parent: int, writing: Connection, drawn: Any) -> NoReturn:
    global _to_parent
    try:
        # A parent that the system kills ends the child too, which would keep its memory, and a pool's workers.
        end_with_parent = partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.SIGKILL)
        end_with_parent()
        os.register_at_fork(after_in_child=end_with_parent)
        if os.getppid() != parent:
            os._exit(1)
        os.setpgid(0, 0)
        # A handler of the program's must not run twice. A pool that a loss makes ends its workers by SIGTERM.
        for number in filter(lambda number: callable(signal.getsignal(number)), signal.valid_signals()):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _own_memory()
        _cut_off(writing.fileno())
        random.setstate(drawn)
        # The threads of OpenMP are the parent's: a parallel region of the child would wait for them for ever.
        torch.set_num_threads(1)
        _to_parent = writing
        try:
            writing.send((work(), True))
        except BaseException as error:
            writing.send((ChildEndedError(f"it raised {spell(error)}"), True))
    finally:
        os._exit(0)


def _own_memory() -> None:
    """Map anew what the program shares with files and other processes, so that no write of the child reaches those.

    A file without a name, as of a shared tensor, is found among the open ones. Of memory that has none, as that of a
    lock, the child has a copy, or may not write to it where it is large.
    """
    opened, system = {}, ctypes.CDLL(None)
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # of the listing itself
            opened[os.readlink(path), path.stat().st_ino] = str(path)
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, modes, offset, _, inode, *name = [*line.split(maxsplit=5), ""][:6]
        if modes[1] + modes[3] == "ws" and (name[0].endswith(" (deleted)") or os.path.isfile(name[0])):
            start, end = (int(x, 16) for x in addresses.split("-"))
            memory, file = (ctypes.c_void_p(start), ctypes.c_size_t(end - start)), None
            with suppress(OSError):  # also of a file that this user may read no longer
                file = os.open(opened.get((name[0], int(inode)), name[0]), os.O_RDONLY)
            if file is None and end - start > _MOST_COPIED:
                system.mprotect(*memory, mmap.PROT_READ)
                continue
            if file is None:
                file, offset = os.memfd_create("copy"), "0"
                os.write(file, (ctypes.c_char * (end - start)).from_address(start))
            access, place = mmap.PROT_READ | mmap.PROT_WRITE, ctypes.c_long(int(offset, 16))
            system.mmap(*memory, access, _PRIVATE_IN_PLACE, file, place)
            os.close(file)


def _cut_off(kept: int) -> None:
    """Let all files, pipes and sockets lead nowhere: what is written is lost, and a read raises OSError.

    So does what `open` overwrites or appends to, and it opens none to update it. A file that the child itself has made,
    as to read it again, is one.
    """
    began = time.time() - 0.005  # files have their times by a clock that stands still for up to 4 ms

    def opened(before: Callable[..., Any], file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        is_path = isinstance(file, str | bytes | os.PathLike) and not {*"wax+"}.isdisjoint(mode)
        if is_path and os.path.isfile(file):
            file, mode = os.devnull if os.stat(file).st_ctime < began else file, mode.replace("x", "w")
        return before(file, mode, *args, **kwargs)

    builtins.open = io.open = partial(opened, open)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for name in os.listdir("/proc/self/fd"):
        if int(name) != kept:
            with suppress(OSError):  # of the listing itself
                os.fstat(int(name))
                os.dup2(nowhere, int(name))


class RerunEndedError(BaseException):
    """The clock has ended the code of the program that is run again. The text says where."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Give the block its time. Raises RerunEndedError in this thread where it takes longer."""
    thread, end_waiting = threading.get_ident(), waiting_ends()
    # Only the main thread gets signals, and a handler of the program's stays.
    is_main = threading.current_thread() is threading.main_thread()
    is_free = is_main and _ENDS_RUN and signal.getsignal(_ENDS_RUN) in (signal.SIG_DFL, signal.SIG_IGN)
    lock, is_over, words = threading.Lock(), False, ""

    def strike() -> None:
        nonlocal words
        with lock:
            if is_over:
                return
            frames = ((x.f_code.co_filename, line) for x, line in walk_stack(sys._current_frames()[thread]))
            lines = (f"line {line} of {name}" for name, line in frames if not is_library(name))
            words = f"it took longer than {seconds:.0f} s at {next(lines, 'an unknown line')}, and was ended"
            # Code that the end passes through, as an executor's `with`, may wait for a thread of its own.
            end_waiting()
            if is_free:
                signal.pthread_kill(thread, _ENDS_RUN)
            else:
                # Where this thread waits for a lock, the error comes with the lock: no signal reaches the thread.
                error = ctypes.py_object(RerunEndedError)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)

    def at_signal(*_: Any) -> None:
        if words and not is_over:
            raise RerunEndedError

    timer = threading.Timer(seconds, strike)
    timer.daemon = True
    before = signal.signal(_ENDS_RUN, at_signal) if is_free else None
    try:
        try:
            timer.start()
            yield
        finally:
            is_over = True  # before it waits, so that the handler raises nothing here
            with lock:
                timer.cancel()
            if is_free:
                signal.signal(_ENDS_RUN, before)
    except RerunEndedError:  # also one that came as the block was left
        raise RerunEndedError(words) from None


@contextmanager
def in_place_of(owner: Any, name: str, stand_in: Callable[..., Any]) -> Iterator[None]:
    """Let this thread's calls of `owner.name` run the stand-in in the block. Those of other threads run as they did."""
    before, is_inherited, threads = getattr(owner, name), name not in vars(owner), [threading.get_ident()]

    def call(*args: Any, **kwargs: Any) -> Any:
        return (stand_in if threading.get_ident() in threads else before)(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        threads.clear()  # two threads may end their blocks in any order
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
