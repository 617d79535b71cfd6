"""A rank of a job with a launcher a node: one quits before the job has begun, and is bad data's after the restart.

    torchrun ... elastic_node.py steady|quits FOLDER

prints a line of JSON: who this is, how often its launcher says to have restarted, and what it is told.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nanwatch
from support.watching import watch


def main() -> None:
    node, folder = sys.argv[1], Path(sys.argv[2])
    has_quit = folder / "quit"
    if node == "quits" and not has_quit.exists():
        has_quit.touch()
        sys.exit(1)
    dist.init_process_group("gloo")
    told = {
        "node": node,
        "rank": dist.get_rank(),
        "restarts": int(os.environ["TORCHELASTIC_RESTART_COUNT"]),
        "origin": None,
    }
    model = DistributedDataParallel(nn.Linear(4, 4))
    error = None
    try:
        with watch(model, output_dir=folder, peer_timeout=6):
            for batch in range(20):
                value = float("nan") if batch == 3 and node == "quits" else 1.0
                model(torch.full((2, 4), value)).sum().backward()
    except nanwatch.NonFiniteError as caught:
        error, told["origin"] = caught, str(caught.origin)
    sys.stdout.write(f"{json.dumps(told)}\n")
    sys.stdout.flush()
    if error is not None:
        raise error


main()
