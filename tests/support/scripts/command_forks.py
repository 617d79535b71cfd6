"""Run Python programs in forks of this process, which has imported torch: each then starts at once.

The words behind the number of the socket are more modules to import. A message on the socket has a program as JSON and
the descriptors of its stdin, stdout and stderr. The last descriptor gets the number of its process and, when it has
ended, its exit status.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import json
import os
import runpy
import socket
import sys
import warnings
from pathlib import Path

import torch
import torch._dynamo

OWN_PYTHONPATH = os.environ["PYTHONPATH"].split(os.pathsep)


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # or each fork would look through all of it, and so copy it, at its end
    while True:
        request, descriptors, *_ = socket.recv_fds(channel, 1 << 20, 4)
        if not request:
            return
        if os.fork() == 0:
            channel.close()
            child = os.fork()
            if child == 0:
                begin(descriptors, **json.loads(request))
                return
            os.write(descriptors[3], f"{child}\n".encode())
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            os.write(descriptors[3], f"{status}\n".encode())
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
        with contextlib.suppress(ChildProcessError):  # none is left
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def begin(descriptors: list[int], folder: str, environment: dict[str, str], words: list[str]) -> None:
    """Do as `python WORDS` does in this folder and environment."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    torch.default_generator.seed()  # as in each new process
    given = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[1:] = [*given, *(path for path in sys.path[1:] if path not in OWN_PYTHONPATH)]
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=bool(environment.get("PYTHONUNBUFFERED")))
    while words[0] == "-W":
        action, _, category = words[1].partition("::")
        warnings.simplefilter(action, getattr(builtins, category or "Warning"))  # type: ignore[arg-type]
        words = words[2:]
    if words[:2] == ["-m", "nanwatch"]:
        sys.argv = words[1:]
        sys.path[0] = folder
        sys.exit(importlib.import_module("nanwatch.__main__").main())
    if words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path[0] = ""
        exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        return
    sys.argv = words
    sys.path[0] = str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


if __name__ == "__main__":
    main()
