"""Isolation of re-runs: a forked child process where one can be had, else this process, in both under a clock.

The child is a copy of the process at the moment of the failure, so what it runs changes neither the program's Python
state nor its tensors. Files, pipes and sockets that are open lead nowhere there. The child sends its result back over a
pipe. A parent that waits too long ends the child and goes on. CUDA does not survive a fork, and neither do macOS's
frameworks.

The clock ends a run that waits or loops, and notes at which line.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from traceback import walk_stack
from typing import Any, NoReturn

import torch

from ..instrumentation.slot import waiting_ends
from ..util.program_code import is_library
from ..util.visible import spell

# The parent acts on these, and a handler of the program's must not run twice.
_IGNORED = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGPIPE")
_PR_SET_PDEATHSIG = 1
# Ends a run in the main thread: a wait for a lock lets a signal through. Ignored by default; Windows has none.
_ENDS_RUN: Any = getattr(signal, "SIGURG", None)


def can_fork() -> bool:
    """Return whether a re-run can have a process of its own.

    Not beside a CUDA device: after a backward, also of a model on the CPU, autograd refuses one in a forked child.
    """
    return sys.platform == "linux" and torch.cuda.device_count() == 0


class ChildEndedError(RuntimeError):
    """The child ended without a result. The text says why."""


# In the child: sends a document to the parent. In the program itself None.
_send: Callable[[Any], None] | None = None


def send(document: Any = None) -> None:
    """Send the parent what is known so far, and start its clock anew. Does nothing in the program itself."""
    if _send is not None:
        _send(document)


def is_child() -> bool:
    """Return whether this process is a forked child."""
    return _send is not None


def run_in_child(work: Callable[[], Any], seconds: float) -> Iterator[Any]:
    """Run `work` in a forked child, which has one thread. Yield what it sends, and in the end what it returns.

    These are texts or other plain documents. seconds: how long the child may go without a call of `send`.

    Raises ChildEndedError where no process can be had, or it takes longer or ends without a result, and what a signal
    handler of the program raises meanwhile, after the child has been ended.
    """
    drawn = random.getstate()  # which Python seeds anew in a child
    reading, writing = multiprocessing.Pipe(duplex=False)
    with warnings.catch_warnings(), reading:
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        parent = os.getpid()
        with writing:
            try:
                child = os.fork()
            except OSError as error:
                raise ChildEndedError(f"no process could be had: {error}") from None
            if child == 0:
                _be_child(work, parent, writing, drawn)
        try:
            document, is_last, reason = None, False, ""
            while not is_last:
                if not reading.poll(seconds):
                    raise ChildEndedError(f"it took longer than {seconds:.0f} s, and was ended")
                try:
                    document, is_last, reason = reading.recv()
                except (EOFError, OSError):
                    raise ChildEndedError(f"its process ended{_status(child)}") from None
                if reason:
                    raise ChildEndedError(reason)
                if document is not None:
                    yield document
        finally:
            # The program's own handler may have taken the status.
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)


def _status(child: int) -> str:
    with suppress(ChildProcessError):
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # so that its number stays taken
        is_exit = ended.si_code == os.CLD_EXITED  # type: ignore[union-attr]
        status = ended.si_status  # type: ignore[union-attr]
        return f" with status {status}" if is_exit else f" by {signal.Signals(status).name}"
    return ""


def _be_child(work: Callable[[], Any], parent: int, writing: Connection, drawn: Any) -> NoReturn:
    global _send
    try:
        # A parent that the system kills for its memory ends the child too, which would keep that memory.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)
        for name in _IGNORED:
            signal.signal(getattr(signal, name), signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _cut_off(writing.fileno())
        random.setstate(drawn)
        # The threads of OpenMP are the parent's: a parallel region of the child would wait for them for ever.
        torch.set_num_threads(1)
        _send = lambda document: writing.send((document, False, ""))  # noqa: E731
        try:
            writing.send((work(), True, ""))
        except BaseException as error:
            writing.send((None, True, f"it raised {spell(error)}"))
    finally:
        os._exit(0)


def _cut_off(kept: int) -> None:
    """Let all files, pipes and sockets lead nowhere: what is written is lost, and a read raises OSError."""
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
    before, is_inherited = getattr(owner, name), name not in vars(owner)
    thread, is_over = threading.get_ident(), threading.Event()

    def call(*args: Any, **kwargs: Any) -> Any:
        is_ours = threading.get_ident() == thread and not is_over.is_set()
        return (stand_in if is_ours else before)(*args, **kwargs)

    setattr(owner, name, call)
    try:
        yield
    finally:
        is_over.set()  # two threads may end their blocks in any order
        if is_inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
