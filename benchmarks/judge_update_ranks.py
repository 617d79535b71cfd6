"""Judge the audit across ranks by jobs of two: healthy ones say nothing, faulty ones name their kind, bits stay equal.

    python benchmarks/judge_update_ranks.py              # all, about two minutes
    python benchmarks/judge_update_ranks.py ddp shards   # those whose names contain one of the words

A line for each training that is not as it should be, then the sums. Each trains once watched, with `updates=1`, which
audits each step, and once without a watch.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import warnings
from pathlib import Path

import torch
import torch._dynamo  # seconds that each process would spend
import torch.distributed as dist
from _rank_trainings import FAULTY, HEALTHY, Run
from torch import nn

import nanwatch

_LIMIT = 60.0  # seconds for a training


def child(rank: int, port: int, name: str, folder: str) -> None:
    """Train as one rank, and write what was said and whether the bits are those without a watch."""
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    training = HEALTHY[name] if name in HEALTHY else FAULTY[name][1]
    runs = [Run(watched=watched) for watched in (False, True)]
    for run in runs:
        training(run)
    ends = [[local(x) for x in run.model.state_dict().values()] for run in runs]
    equal = all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    kinds = sorted({finding.kind for finding in runs[1].findings})
    Path(folder, str(rank)).write_bytes(pickle.dumps((kinds, equal)))
    dist.barrier()
    os._exit(0)


def local(x: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor."""
    return x.to_local() if hasattr(x, "to_local") else x


def fault(name: str) -> str:
    """Train in two processes, and return what is not as it should be."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        ranks = [context.Process(target=child, args=(rank, port, name, folder)) for rank in range(2)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join(_LIMIT)
            process.kill()
        written = [Path(folder, str(rank)) for rank in range(2)]
        if not all(path.exists() for path in written):
            return "a rank did not end"
        results = [pickle.loads(path.read_bytes()) for path in written]
    said = sorted({kind for kinds, _ in results for kind in kinds})
    meant = [FAULTY[name][0]] if name in FAULTY else []
    if said != meant:
        return f"says {', '.join(said) or 'nothing'}"
    return "" if all(equal for _, equal in results) else "other bits than without a watch"


def main() -> int:
    """Judge, and return 1 if anything is not as it should be."""
    names = [one for one in (*HEALTHY, *FAULTY) if not sys.argv[1:] or any(w in one for w in sys.argv[1:])]
    # Imports most of nanwatch here, once.
    with nanwatch.watch(model := nn.Linear(1, 1), updates=True, black_box=False):
        model(torch.ones(1, 1)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    wrong = 0
    for name in names:
        if found := fault(name):
            wrong += 1
            print(f"{name:<32} {found}", flush=True)
    print(f"{len(names) - wrong} of {len(names)} trainings of two ranks as they should be")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
