"""Run Python programs in forks of this process, which has imported torch: each then starts at once.

    python command_forks.py DESCRIPTOR PID MODULE...

The modules are imported too. The descriptor is a socket that listens, in a folder of its own. Each process that
connects, such as fork_client.py, sends a message with a program as JSON and the descriptors of its stdin, stdout and
stderr. It receives the number of the program's process and, when that has ended, its exit status. All ends with the
process PID, and the folder goes.
"""

import builtins
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import time
import warnings
from pathlib import Path

import torch
import torch._dynamo

OWN_PYTHONPATH = os.environ["PYTHONPATH"].split(os.pathsep)


def main() -> None:
    clients, ended = socket.socket(fileno=int(sys.argv[1])), os.pidfd_open(int(sys.argv[2]))
    for name in sys.argv[3:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or each fork would look through all of it, and so copy it, at its end
    while ended not in select.select([clients, ended], [], [])[0]:
        client = clients.accept()[0]
        if os.fork() == 0:
            clients.close()
            serve(client)
            return
        client.close()
        with contextlib.suppress(ChildProcessError):  # none is left
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    shutil.rmtree(Path(clients.getsockname()).parent)


def serve(client: socket.socket) -> None:
    """Fork once more: the child is the program, and returns. This process sends its number and its exit status."""
    request, descriptors, *_ = socket.recv_fds(client, 1 << 20, 3)
    child = os.fork()
    if child == 0:
        client.close()
        begin(descriptors, **json.loads(request))
        return
    with contextlib.suppress(BrokenPipeError):
        client.send(str(child).encode())
        client.send(str(status_of(child, client)).encode())
    os._exit(0)


def status_of(child: int, client: socket.socket) -> int:
    """Return the exit status of the child, which is killed when the client has gone."""
    ended = os.pidfd_open(child)
    waiting = select.poll()
    waiting.register(ended, select.POLLIN)
    waiting.register(client, 0)  # a connection that is closed is always told
    if all(descriptor != ended for descriptor, _ in waiting.poll()):
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def begin(descriptors: list[int], folder: str, environment: dict[str, str], words: list[str]) -> None:
    """Do as `python WORDS` does in this folder and environment."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.default_generator.seed()  # as in each new process
    # Not ignored, as a shell script's `make test &` would have it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if job := sys.modules.get("nanwatch.util.job"):
        job._BEGUN = time.time()
    sys.executable = environment.get("PYTHON_EXEC", sys.executable)
    given = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[1:] = [*given, *(path for path in sys.path[1:] if path not in OWN_PYTHONPATH)]
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=bool(environment.get("PYTHONUNBUFFERED")))
    while words[0][:2] in ("-B", "-W", "-u"):
        flag, *words = words
        if flag == "-u":
            sys.stdout.reconfigure(write_through=True)
        elif flag.startswith("-W"):
            wanted, words = (flag[2:], words) if flag[2:] else (words[0], words[1:])
            action, _, category = wanted.partition("::")
            warnings.simplefilter(action, getattr(builtins, category or "Warning"))  # type: ignore[arg-type]
    if words[:2] == ["-m", "nanwatch"]:
        sys.argv = words[1:]
        sys.path[0] = folder
        sys.exit(importlib.import_module("nanwatch.__main__").main())
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[0] = ""
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        return
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[0] = folder
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
