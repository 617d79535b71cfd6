"""Python processes that tests start: their environment, and those that are forked from one that has imported torch."""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, NamedTuple

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


def forked(
    *arguments: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    input: str = "",
    stdout: int | None = None,
    stderr: int | None = None,
    timeout: float = 300,
    imported: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` in a process that starts at once, as torch is imported there already, and nanwatch.

    `arguments` are those of a script, of `-c CODE` or of `-m nanwatch`, each with any `-W ACTION` before it. What
    Python and torch take from the environment when they start, such as PYTHONHASHSEED, is that of the server. With
    `imported=False` the program imports nanwatch itself, from its own PYTHONPATH.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(input.encode())
        given.seek(0)
        reader, writer = os.pipe()
        request = {
            "folder": str(cwd or Path.cwd()),
            "environment": dict(environment() if env is None else env),
            "words": list(arguments),
        }
        stdout = out.fileno() if stdout is None else stdout
        stderr = stdout if stderr == subprocess.STDOUT else err.fileno()
        descriptors = [given.fileno(), stdout, stderr, writer]
        socket.send_fds(
            _server(*(_IMPORTED if imported else ())).channel, [json.dumps(request).encode()], descriptors
        )
        os.close(writer)
        with open(reader, encoding="ascii") as answers:
            child = int(answers.readline())
            status = _within(answers, child, timeout)
        if status is None:
            raise subprocess.TimeoutExpired(list(arguments), timeout, _text(out), _text(err))
        return subprocess.CompletedProcess(list(arguments), status, _text(out), _text(err))


def _within(answers: IO[str], child: int, timeout: float) -> int | None:
    """Return the exit status of the child, or None after a timeout, at which it is killed."""
    is_late = not select.select([answers], [], [], timeout)[0]
    if is_late:
        os.kill(child, signal.SIGKILL)
    status = int(answers.readline())
    return None if is_late else status


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def until(happened: Callable[[], object], seconds: float = 30) -> None:
    """Wait for what a thread or another process does."""
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.002)


def forking_python() -> str:
    """Return the path of a program that does as `python` does, in a fork as those of `forked`.

    It takes the arguments that `forked` takes. Where PYTHON_EXEC has its path too, the processes that torchrun starts
    are forks, and so are those that a program starts by `sys.executable`. SIGSTOP does not reach a fork.
    """
    return str(_server(*_IMPORTED).python)


class _Server(NamedTuple):
    """The socket to a process that forks, and a program that asks the process for a fork."""

    channel: socket.socket
    python: Path


@functools.cache
def _server(*names: str) -> _Server:
    """Start the process that forks. It ends when the socket is closed, at the latest by the end of this process."""
    folder = tempfile.TemporaryDirectory(prefix="forks-")
    python, path = Path(folder.name, "python"), Path(folder.name, "socket")
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S "{SCRIPTS / "fork_client.py"}" "{path}" "$@"\n')
    python.chmod(0o755)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    clients = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    clients.bind(str(path))
    clients.listen()
    with theirs, clients:
        descriptors = [theirs.fileno(), clients.fileno()]
        server = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "command_forks.py"), *map(str, descriptors), *names],
            env=environment(OMP_NUM_THREADS="1", PYTHONUNBUFFERED=""),
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    atexit.register(_end, ours, server, folder)
    return _Server(ours, python)


def _end(
    channel: socket.socket, server: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]
) -> None:
    channel.close()
    server.wait(60)
    folder.cleanup()
