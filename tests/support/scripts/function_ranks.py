"""A data-parallel training that goes on after failures, watched with a function, and the same one unwatched.

    RANK=0 WORLD_SIZE=2 python function_ranks.py STORE

Each rank prints one JSON object: `calls` of the function, `seen` by plain forward hooks, and whether the training ended
with the weights of the unwatched one.
"""

from __future__ import annotations

import json
import os
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nanwatch
from support import watching

RANK = int(os.environ["RANK"])
# By batch: the ranks on which a value overflows, and whether the step is taken all the same.
PLAN = {1: ([1], False), 3: ([0], False), 5: ([0, 1], False), 7: ([1], True)}
BATCHES = 10
PEER_TIMEOUT = 5.0


class Scale(nn.Module):
    factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor * self.factor


def train(*, is_watched: bool) -> tuple[list[object], list[object], bytes]:
    """Return the calls of the function, the non-finite outputs, and the last weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Scale(), nn.Linear(4, 4))
    run = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    draw = torch.Generator().manual_seed(RANK)
    calls: list[object] = []
    seen: list[object] = []
    batch = 0

    def tell(report: nanwatch.Report) -> None:
        origin, finding = report.origin, report.finding
        first = None if origin is None else origin.first
        calls.append(
            [
                finding.batch,
                first and [first.rank, first.batch, first.module, origin.num_alike, origin.is_complete],
                finding.operation is not None,
                "Among the ranks: " in report.to_text(),
            ]
        )

    def look(name: str, output: torch.Tensor) -> None:
        if not is_watched and not output.isfinite().all():
            seen.append([batch, name])

    for name, one in model.named_children():
        one.register_forward_hook(lambda _, __, output, name=name: look(name, output))
    watch = watching.watch(model, on_nonfinite=tell, peer_timeout=PEER_TIMEOUT, enabled=is_watched)
    with watch:
        for batch in range(BATCHES):
            guilty, steps = PLAN.get(batch, ([], True))
            model[1].factor = 1e30 if RANK in guilty else 1.0
            loss = run(torch.randn(2, 4, generator=draw)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            if steps:
                optimizer.step()
    weights = b"".join(one.detach().numpy().tobytes() for one in model.parameters())
    return calls, seen, weights


warnings.simplefilter("ignore")
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=RANK, world_size=2)
_, found, plain = train(is_watched=False)
told, _, watched = train(is_watched=True)
shown = {"calls": told, "seen": found, "is_equal": plain == watched}
sys.stdout.write(f"{json.dumps(shown)}\n")
dist.destroy_process_group()
