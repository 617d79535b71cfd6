"""`nanwatch run --parent`: a process that waits for the script's, and writes into its black box how it ended."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from ..blackbox.box_file import SUFFIX, BoxFile
from ..blackbox.story import signal_name
from ..util.visible import visible

_PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
_SET_PDEATHSIG = 1  # of prctl


def run_with_parent(run: Callable[[], int], folder: Path) -> int:
    """Fork. Return the status of `run` in the child, and in the parent that of the child, or end by its signal.

    `folder` is where the child keeps its black box. Signals that somebody sends to the parent go to the child. A
    terminal sends its own to both. A killed parent takes the child with it.
    """
    parent = os.getpid()
    # Where the parent ignores SIGCHLD, as it may by inheritance, the kernel reports no end of a child.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_PASSED_ON, signal.SIGCHLD})
    child = os.fork()
    if child == 0:
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, int(signal.SIGKILL))
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGCHLD, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return run()
    status = _wait(child)
    if status >= 0:
        return status
    _tell(child, -status, folder)
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))  # the child's dump is the one to read
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(parent, -status)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 128 - status


def _wait(child: int) -> int:
    """Return the exit status of the child, or the negative number of the signal that ended it."""
    while True:
        info = signal.sigwaitinfo({*_PASSED_ON, signal.SIGCHLD})
        if info.si_signo == signal.SIGCHLD:
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid == child:
                return os.waitstatus_to_exitcode(status)
        elif info.si_code <= 0:  # sent by a process
            os.kill(child, info.si_signo)


def _tell(child: int, number: int, folder: Path) -> None:
    """Write into the black box of the child by which signal it ended, and say on stderr where the box is."""
    for path in folder.glob(f"rank-*-{socket.gethostname()}-{child}-*{SUFFIX}"):
        try:
            BoxFile(path).write_state("killed_by", number)
        except (OSError, ValueError) as error:
            print(visible(f"nanwatch run: {path}: {error}"), file=sys.stderr)
            continue
        text = f"{signal_name(number)} ended the script; `nanwatch show {path}` has what it was doing"
        print(visible(f"nanwatch run: {text}"), file=sys.stderr, flush=True)
