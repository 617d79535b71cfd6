"""Tasks in processes of their own, each forked from this one, which has imported much and has run nothing."""

from __future__ import annotations

import faulthandler
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

# Seconds for one task. The slowest takes 2 s on an idle machine.
_PATIENCE = 300

_R = TypeVar("_R")


def each_in_a_process(
    function: Callable[..., _R], tasks: Sequence[tuple[Any, ...]], jobs: int
) -> Iterator[_R | str]:
    """Yield the result of `function(*task)` for each task in turn, each from a process of its own.

    The result of a process that fails is what it raised, in words.
    """
    context = multiprocessing.get_context("fork")
    results: dict[int, _R | str] = {}
    running: dict[Connection, tuple[int, Any]] = {}
    waiting = list(enumerate(tasks))
    next_one = 0
    while waiting or running:
        while waiting and len(running) < jobs:
            number, task = waiting.pop(0)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(theirs, function, task))
            process.start()
            theirs.close()
            running[ours] = number, process
        for ready in wait(list(running), timeout=_PATIENCE) or list(running):
            assert isinstance(ready, Connection)
            number, process = running.pop(ready)
            try:
                results[number] = ready.recv() if ready.poll() else f"took longer than {_PATIENCE} s"
            except EOFError:
                results[number] = "its process ended without a result"
            process.kill()
            process.join()
        while next_one in results:
            yield results.pop(next_one)
            next_one += 1


def _child(pipe: Connection, function: Callable[..., Any], task: tuple[Any, ...]) -> None:
    faulthandler.dump_traceback_later(_PATIENCE - 10)
    try:
        result = function(*task)
    except BaseException as error:
        lines = str(error).strip().splitlines()
        result = f"{type(error).__name__}: {lines[0] if lines else ''}"
    pipe.send(result)
    pipe.close()
