"""Running a script as `python SCRIPT` and `python -m MODULE` do, in this process or in a child with a parent."""

from __future__ import annotations

import argparse
import builtins
import ctypes
import os
import pkgutil
import resource
import runpy
import signal
import socket
import sys
from collections.abc import Callable
from io import open_code
from pathlib import Path
from types import ModuleType

from ..blackbox.story import SUFFIX, BoxFile, signal_name
from ..session import model_finder
from ..util.visible import visible

_PASSED_ON = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2}
_SET_PDEATHSIG = 1  # of prctl
# Files whose frames stand between a command and the script.
FILES = (__file__, model_finder.__file__, runpy.__file__, "<frozen runpy>")


def check_script(target: str, *, is_module: bool) -> None:
    """Raise ValueError where there is no such script."""
    if not is_module and not os.path.exists(target):
        raise ValueError(f"there is no script {target!r}; a module is run with -m")


def add_script(parser: argparse.ArgumentParser) -> None:
    """Add SCRIPT, its arguments and -m to the parser of a command that runs a script."""
    parser.allow_abbrev = False
    parser.usage = "%(prog)s [OPTION...] SCRIPT [ARG...]\n       %(prog)s [OPTION...] -m MODULE [ARG...]"
    parser.add_argument("target", metavar="SCRIPT", help="the script, or with -m the module")
    rest = parser.add_argument("arguments", metavar="ARG", nargs=argparse.REMAINDER, help="its own arguments")
    rest.required = False  # argparse would name it beside a missing SCRIPT
    parser.add_argument("-m", action="store_true", help="run a module, as `python -m` does")


def run_script(target: str, arguments: list[str], *, is_module: bool) -> None:
    """Run a script, a module, a folder or zip file with a __main__.py, or a compiled file. Raise what it raises.

    `__main__`, sys.argv and sys.path stay the script's until the process ends, as with `python SCRIPT`: its threads,
    its atexit functions and late child processes need them.
    """
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.argv = [target, *arguments]
    is_file = not is_module and pkgutil.get_importer(target) is None
    if is_module or is_file:
        if not getattr(sys.flags, "safe_path", False):
            sys.path[:1] = [os.getcwd() if is_module else os.path.dirname(os.path.realpath(target))]
    else:
        sys.path[:1] = [target]
    if is_file:
        main.__file__ = path = os.path.abspath(target)
        with open_code(path) as file:
            code = pkgutil.read_code(file)  # of a compiled file
        if code is None:
            code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
        exec(code, vars(main))
    else:
        # As the interpreter does: runpy.run_module would put another __main__ back.
        runpy._run_module_as_main(target if is_module else "__main__", alter_argv=is_module)  # type: ignore[attr-defined]


# `nanwatch run --parent`: a process that waits for the script's, and writes into its black box how it ended.


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
    _write_end(child, -status, folder)
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


def _write_end(child: int, number: int, folder: Path) -> None:
    """Write into the black box of the child by which signal it ended, and say on stderr where the box is."""
    for path in folder.glob(f"rank-*-{socket.gethostname()}-{child}-*{SUFFIX}"):
        try:
            BoxFile(path).write_state("killed_by", number)
        except (OSError, ValueError) as error:
            print(visible(f"nanwatch run: {path}: {error}"), file=sys.stderr)
            continue
        text = f"{signal_name(number)} ended the script; `nanwatch show {path}` has what it was doing"
        print(visible(f"nanwatch run: {text}"), file=sys.stderr, flush=True)
