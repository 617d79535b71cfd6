"""Send each error of a watched model through each channel between processes, and print what came as JSON lines."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import record
from torch.utils.data import DataLoader, Dataset

import nanwatch
from nanwatch.distributed.consensus import PeerNonFiniteError
from nanwatch.report.finding import Finding, Origin, RankObservation

FORK = multiprocessing.get_context("fork")


def nonfinite(limit: int | None = None) -> None:
    model = nn.Sequential(nn.Identity(), nn.LayerNorm(2, eps=0.0 if limit is None else 1e-5))
    with nanwatch.watch(model, abort_after_batch=limit, rerun=False):
        model(torch.zeros(1, 2))


def batch_limit() -> None:
    nonfinite(limit=0)


def peer() -> None:
    try:
        nonfinite()
    except nanwatch.NonFiniteError as error:
        first = cast(Finding, error.report.finding)
        raise PeerNonFiniteError(
            error.report, Origin(RankObservation.of(first, 0, 0, None, ""), 1, 1, 2, 2)
        ) from error


def capsule() -> None:
    nanwatch.Capsule.open("no\nsuch")


def trace() -> None:
    Path("run.parquet").write_text("no trace", encoding="utf-8")
    nanwatch.Trace.open("run.parquet")


def in_a_future(fail: Callable[[], None]) -> None:
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=FORK) as executor:
        executor.submit(fail).result()


def in_a_pool(fail: Callable[[], None]) -> None:
    with FORK.Pool(1) as pool:
        pool.apply(fail)


def in_a_start(fail: Callable[[], None]) -> None:
    torch.multiprocessing.start_processes(
        _ranked, (fail,), start_method="fork"
    )  # as `spawn`, which imports again


def _ranked(rank: int, fail: Callable[[], None]) -> None:
    fail()


def in_torchruns_file(fail: Callable[[], None]) -> None:
    os.environ["TORCHELASTIC_ERROR_FILE"] = "error.json"
    with contextlib.suppress(ValueError):
        record(fail)()
    raise RuntimeError(json.loads(Path("error.json").read_text(encoding="utf-8"))["message"]["message"])


FAILURES = nonfinite, peer, batch_limit, capsule, trace


class Failing(Dataset[int]):
    def __len__(self) -> int:
        return len(FAILURES)

    def __getitem__(self, index: int) -> int:
        FAILURES[index]()
        return index


@functools.cache
def loader() -> Iterator[int]:
    """Return the only loader, as PyTorch waits 5 s for the workers of one that has failed."""
    return iter(DataLoader(Failing(), num_workers=1))


def in_a_loader(fail: Callable[[], None]) -> None:
    next(loader())


CHANNELS = in_a_future, in_a_pool, in_a_start, in_torchruns_file, in_a_loader


def shown() -> Iterator[dict[str, Any]]:
    for send in CHANNELS:
        for fail in FAILURES:
            try:
                send(fail)
            except Exception as error:
                report = getattr(error, "report", None)
                yield {
                    "failure": fail.__name__,
                    "channel": send.__name__,
                    "type": type(error).__name__,
                    "text": str(error),
                    "finding": report is not None and report.finding is not None,
                }


if __name__ == "__main__":
    for one in shown():
        sys.stdout.write(f"{json.dumps(one)}\n")
