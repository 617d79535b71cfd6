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
from collections.abc import Mapping
from pathlib import Path
from typing import IO

import nanwatch
from support.paths import SCRIPTS, TESTS

PYTHONPATH = os.pathsep.join([str(Path(nanwatch.__file__).parents[1]), str(TESTS)])

_IMPORTED = "nanwatch.__main__", "nanwatch.cli.commands"


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
            _server(*(_IMPORTED if imported else ())), [json.dumps(request).encode()], descriptors
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


@functools.cache
def _server(*names: str) -> socket.socket:
    """Start the process that forks. It ends when the socket is closed, at the latest by the end of this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    with theirs:
        server = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "command_forks.py"), str(theirs.fileno()), *names],
            env=environment(OMP_NUM_THREADS="1", PYTHONUNBUFFERED=""),
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    atexit.register(_end, ours, server)
    return ours


def _end(channel: socket.socket, server: subprocess.Popen[bytes]) -> None:
    channel.close()
    server.wait(60)
