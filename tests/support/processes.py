"""Python processes that tests start: their environment, and those that are forked from one that has imported torch."""

import fcntl
import functools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import nanwatch
from support.paths import SCRIPTS, TESTS

PYTHONPATH = os.pathsep.join([str(Path(nanwatch.__file__).parents[1]), str(TESTS)])

# With nanwatch.session.api, which brings most of nanwatch, and what ranks import, a process is 1 to 3 s shorter.
_IMPORTED = (
    *("nanwatch.__main__", "nanwatch.cli.commands", "nanwatch.cli.compare", "nanwatch.session.api"),
    *("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining"),
    *("torch.nn.parallel", "torch.distributed.launcher.api"),
)


def environment(**changes: str) -> dict[str, str]:
    """Return this process's environment with the changes, in which Python finds the same nanwatch and `support`."""
    return os.environ | {"PYTHONPATH": PYTHONPATH} | changes


def user_environment(**changes: str) -> dict[str, str]:
    """Return the environment of a user who has set these variables of nanwatch's alone."""
    kept = environment(**changes)
    return {name: kept[name] for name in kept if name[:8] != "NANWATCH" or name in changes}


def forked(
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    stdout: int = subprocess.PIPE,
    timeout: float = 300,
    imported: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` in a process that starts at once, as torch is imported there already, and nanwatch.

    `arguments` are those of a script, of `-c CODE` or of `-m nanwatch`, each with any `-W ACTION` before it. What
    Python and torch take from the environment when they start, such as PYTHONHASHSEED, is that of the server. With
    `imported=False` the program imports nanwatch itself, from its own PYTHONPATH.
    """
    line, env = [forking_python(imported), *arguments], environment() if env is None else env
    streams = {"stdin": subprocess.DEVNULL, "stdout": stdout, "stderr": subprocess.PIPE}
    return subprocess.run(line, cwd=cwd, env=env, text=True, errors="replace", timeout=timeout, **streams)


def until(happened: Callable[[], object], seconds: float = 30) -> None:
    """Wait for what a thread or another process does."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


@functools.cache
def forking_python(imported: bool = True) -> str:
    """Return the path of a program that does as `python` does, in a fork of one process that it starts.

    It takes the arguments that `forked` takes. Where PYTHON_EXEC has its path too, the processes that torchrun starts
    are forks, and so are those that a program starts by `sys.executable`. SIGSTOP does not reach a fork. All processes
    of a run of pytest have the same server, which ends after the first of them.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    first = os.getppid() if run else os.getpid()
    folder = Path(tempfile.gettempdir(), f"nanwatch-forks-{run or first}-{imported:d}")
    python, path = folder / "python", folder / "socket"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as clients:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return str(python)
        python.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" -S "{SCRIPTS / "fork_client.py"}" "{path}" "$@"\n'
        )
        python.chmod(0o755)
        clients.bind(str(path))
        clients.listen(64)
        script = str(SCRIPTS / "command_forks.py")
        subprocess.Popen(
            [sys.executable, script, str(clients.fileno()), str(first), *(_IMPORTED if imported else ())],
            env=environment(OMP_NUM_THREADS="1", PYTHONUNBUFFERED=""),
            pass_fds=[clients.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    return str(python)
