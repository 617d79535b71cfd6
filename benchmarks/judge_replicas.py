"""Score of `watch(replicas=N, recheck=1)`: flips of single bits in one rank of four, and healthy trainings, over gloo.

Each trial is a short training. Its healthy twin says whether a flip changed a weight, and hashes of the weights, which
the ranks send each other without nanwatch, say whether replicas differ at the end.

    python benchmarks/judge_replicas.py        # 100 healthy trainings, 200 flips: 20 minutes on two busy cores
    python benchmarks/judge_replicas.py --healthy 6 --flips 12 --json scores.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import socket
import sys
import tempfile
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

import nanwatch

RANKS = 4
EVERY = 5
STEPS = 16
FLIPS_AT = range(3, 10)  # a check follows
FORMS = ("ddp", "hsdp", "zero1", "tp")
OPTIMIZERS = ("sgd", "adam", "adamw", "adamw foreach", "adamw fused")
SITES = ("weight", "state", "gradient", "local gradient", "activation")


class Block(nn.Module):
    """Attention of one head and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` and what it attends to."""
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v))


def mlp() -> nn.Module:
    """Return layers for which tensor parallelism has a plan."""
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))


def normed() -> nn.Module:
    """Return layers with statistics that differ between ranks, and chance."""
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 8))


def convolutions() -> nn.Module:
    """Return a small network for images of 4 by 2."""
    return nn.Sequential(
        nn.Unflatten(1, (1, 4, 2)), nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(32, 8),
    )  # fmt: skip


def attention() -> nn.Module:
    """Return a small transformer block with a constant table."""
    model = nn.Sequential(
        nn.Linear(8, 16), nn.Unflatten(0, (-1, 2)), Block(), nn.Flatten(0, 1), nn.Linear(16, 8)
    )
    model.register_buffer("table", torch.arange(8.0))
    return model


MODELS = {one.__name__: one for one in (mlp, normed, convolutions, attention)}


def trials(num_healthy: int, num_flips: int) -> list[dict[str, Any]]:
    """Return the trials: each configuration healthy, and with flips the configurations that come first."""
    chance = random.Random(7)
    found: list[dict[str, Any]] = []
    for number in range(num_healthy):
        form = FORMS[number % len(FORMS)]
        found.append({
            "number": number, "form": form, "model": "mlp" if form == "tp" else chance.choice(list(MODELS)),
            "optimizer": chance.choice(OPTIMIZERS), "seed": chance.randrange(10**6), "site": "",
        })  # fmt: skip
    for number in range(num_flips):
        one = found[number % num_healthy]
        flip = {
            "site": SITES[number // len(FORMS) % len(SITES)], "rank": chance.randrange(RANKS),
            "step": chance.choice(FLIPS_AT), "bit": chance.randrange(32), "place": chance.random(),
        }  # fmt: skip
        found.append(one | flip)
    return sorted(found, key=lambda one: (one["number"], one["site"] != ""))


def made(one: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the parallel model and its optimizer."""
    torch.manual_seed(one["seed"])
    model = MODELS[one["model"]]()
    if one["form"] in ("ddp", "zero1"):
        model = nn.parallel.DistributedDataParallel(model)
    elif one["form"] == "hsdp":
        from torch.distributed.fsdp import fully_shard

        mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for child in model:
            if any(True for _ in child.parameters()):
                fully_shard(child, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = dist.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
        parallelize_module(model, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
        for name, p in list(model[0].named_parameters()):
            replicated = distribute_tensor(p.detach(), mesh, [Replicate()])
            setattr(model[0], name, nn.Parameter(replicated))
        forward = model[0].forward
        model[0].forward = lambda x: forward(DTensor.from_local(x, mesh, [Replicate()])).to_local()
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "sgd": (torch.optim.SGD, {"momentum": 0.9}),
        "adam": (torch.optim.Adam, {}),
        "adamw": (torch.optim.AdamW, {"foreach": False}),
        "adamw foreach": (torch.optim.AdamW, {"foreach": True}),
        "adamw fused": (torch.optim.AdamW, {"fused": True}),
    }
    kind, more = kinds[one["optimizer"]]
    if one["form"] == "zero1":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return model, ZeroRedundancyOptimizer(model.parameters(), kind, lr=1e-2, **more)
    return model, kind(model.parameters(), lr=1e-2, **more)


def local(x: Tensor) -> Tensor:
    """Return the part of a tensor on this rank."""
    return x.to_local() if hasattr(x, "to_local") else x


def flip(x: Tensor, bit: int, place: float) -> None:
    """Flip a bit of one element, without a sign that PyTorch would see."""
    words = local(x.detach()).data.view(torch.int32).reshape(-1)
    if len(words):
        words.numpy()[int(place * len(words))] ^= (1 << bit) - (1 << 32) * (bit == 31)


def chosen(tensors: list[Tensor], place: float) -> Tensor:
    """Return one of the float32 tensors that this rank holds something of."""
    several = [x for x in tensors if x.dtype == torch.float32 and local(x.detach()).numel()]
    return several[int(place * 7919) % len(several)]


def train(one: dict[str, Any], rank: int, *, is_watched: bool = True) -> dict[str, Any]:
    """Train, and return what came of it on this rank."""
    model, optimizer = made(one)
    is_odd = one["site"] != "" and one["rank"] == rank
    torch.manual_seed(one["seed"] + (0 if one["form"] == "tp" else rank))
    watch = nanwatch.watch(
        model,
        replicas=EVERY,
        recheck=1,
        on_nonfinite="record",
        forecast=False,
        black_box=False,
        enabled=is_watched,
    )
    hooks = []
    now = [0]

    def spoil(x: Tensor) -> Tensor:
        changed = x.clone()
        flip(changed, one["bit"], one["place"])
        return changed

    if is_odd and one["site"] == "local gradient":
        victim = chosen(list(model.parameters()), one["place"])
        hooks.append(victim.register_hook(lambda g: spoil(g) if now[0] == one["step"] else g))
    linear = nn.functional.linear
    calls = [0]

    def spoilt(*args: Any) -> Tensor:
        # The first run of a call; every other of its repetitions comes after it, and is right.
        out = linear(*args)
        if now[0] == one["step"] and type(out) is Tensor:
            calls[0] += 1
            if calls[0] == 1:
                flip(out, one["bit"], one["place"])
        return out

    if is_odd and one["site"] == "activation":
        nn.functional.linear = spoilt
    for step in range(1, STEPS + 1):
        now[0] = step
        model(torch.randn(4, 8)).pow(2).mean().backward()
        is_now = is_odd and step == one["step"]
        if is_now and one["site"] == "gradient":
            flip(
                chosen([p.grad for p in model.parameters() if p.grad is not None], one["place"]),
                one["bit"],
                one["place"],
            )
        optimizer.step()
        optimizer.zero_grad()
        if is_now and one["site"] == "weight":
            flip(chosen(list(model.parameters()), one["place"]), one["bit"], one["place"])
        if is_now and one["site"] == "state":
            inner = getattr(optimizer, "optim", optimizer)
            states = [item for state in inner.state.values() for item in state.items()]
            held = [x for _, x in states if isinstance(x, Tensor)]
            if one["bit"] == 31:  # Adam raises where its number of steps is below 0
                held = [x for name, x in states if isinstance(x, Tensor) and name != "step"]
            if held:
                flip(chosen(held, one["place"]), one["bit"], one["place"])
    weights = {name: local(p.detach()).clone() for name, p in model.named_parameters()}
    places = {name: _places(p) for name, p in model.named_parameters()}
    watch.stop()
    nn.functional.linear = linear
    for hook in hooks:
        hook.remove()
    finding = watch.report().finding
    return {
        "hashes": {n: hashlib.sha256(x.contiguous().numpy().tobytes()).hexdigest()[:16] for n, x in weights.items()},
        "places": places,
        "told": [(d.step, list(d.ranks), d.is_majority, list(d.tensors)) for d in watch.replica_differences],
        "suspects": [s.batch for s in watch.hardware_suspects],
        "nonfinite": None if finding is None else finding.batch,
    }  # fmt: skip


def _places(p: Tensor) -> str:
    """Return a word that ranks with the same part of a tensor share."""
    if not hasattr(p, "placements"):
        return "all"
    here = p.device_mesh.get_coordinate()
    return str([at for at, placement in zip(here, p.placements, strict=True) if not placement.is_replicate()])


def judged(one: dict[str, Any], seen: list[dict[str, Any]], healthy: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the outcome of a trial on all ranks."""
    parts: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for rank in seen:
        for name, value in rank["hashes"].items():
            parts[name, rank["places"][name]].add(value)
    told = [difference for rank in seen for difference in rank["told"]]
    suspects = [rank["suspects"] for rank in seen]
    found = {
        "changed": any(a["hashes"] != b["hashes"] for a, b in zip(seen, healthy, strict=True)),
        "differs": any(len(values) > 1 for values in parts.values()),
        "told": told + [batch for rank in suspects for batch in rank],
        "nonfinite": [rank["nonfinite"] for rank in seen],
    }
    if one["site"]:
        in_time = [d for d in told if 0 <= d[0] - one["step"] <= EVERY]
        found["named"] = any(d[1] == [one["rank"]] and d[2] for d in in_time)
        found["rechecked"] = suspects[one["rank"]] == [one["step"] - 1]
        found["one of two"] = any(one["rank"] in d[1] and not d[2] for d in in_time)
        batches = [b for b in found["nonfinite"] if b is not None]
        own = found["nonfinite"][one["rank"]]
        found["as nonfinite"] = own is not None and own == min(batches)
        found["wrong"] = any(one["rank"] not in d[1] for d in told)
        found["wrong"] |= any(batches for rank, batches in enumerate(suspects) if rank != one["rank"])
    return found


def job(rank: int, port: int, listed: list[dict[str, Any]], out: str) -> None:
    """One rank: all trials, one after the other."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "WORLD_SIZE": str(RANKS),
    }
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    healthy: dict[int, list[dict[str, Any]]] = {}
    with open(out if rank == 0 else os.devnull, "w", encoding="utf-8") as file:
        for one in listed:
            seen: list[Any] = [None] * RANKS
            dist.all_gather_object(seen, train(one, rank))
            if not one["site"]:
                healthy[one["number"]] = seen
            file.write(json.dumps({**one, **judged(one, seen, healthy[one["number"]])}) + "\n")
            file.flush()
    dist.barrier()
    dist.destroy_process_group()


def scores(outcomes: list[dict[str, Any]]) -> tuple[str, bool]:
    """Return the table, and whether the aims are met."""
    well = [one for one in outcomes if not one["site"]]
    alarms = [one for one in well if one["told"]]
    lines = [f"healthy trainings {len(well)}: {len(alarms)} told a difference"]
    lines.append(
        "site            form   flips  changed  differ  named  one of two  rechecked  non-finite  wrong rank"
    )
    rows: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for one in outcomes:
        if one["site"]:
            for key in ((one["site"], one["form"]), ("all", "")):
                row = rows[key]
                row["flips"] += 1
                row["changed"] += one["changed"]
                row["differ"] += one["differs"]
                if one["changed"]:
                    how = next(
                        (k for k in ("named", "one of two", "rechecked", "as nonfinite") if one[k]), "missed"
                    )
                    row[how] += 1
                    is_visible = one["differs"] or one["site"] == "activation"
                    row["visible"] += is_visible
                    row["found"] += is_visible and how != "missed"
                row["wrong"] += one["wrong"]
    for (site, form), row in sorted(rows.items(), key=lambda item: (item[0][0] == "all", item[0])):
        lines.append(
            f"{site:15} {form:5} {row['flips']:6} {row['changed']:8} {row['differ']:7} {row['named']:6}"
            f" {row['one of two']:11} {row['rechecked']:10} {row['as nonfinite']:11} {row['wrong']:11}"
        )
    total = rows["all", ""]
    found, visible = total["found"], max(1, total["visible"])
    lines.append(
        f"told: {found} of the {total['visible']} flips that a replica or a repeated call shows ({found / visible:.1%})"
        f" of {total['changed']} that changed a weight"
    )
    return "\n".join(lines), not alarms and not total["wrong"] and found >= 0.95 * visible


def main() -> int:
    """Status 0 where the aims are met."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--healthy", type=int, default=100)
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write each trial's outcome to this file, a line each")
    options = parser.parse_args()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        out = options.json or Path(folder, "outcomes.jsonl")
        begun = time.monotonic()
        mp.spawn(job, args=(port, trials(options.healthy, options.flips), str(out)), nprocs=RANKS)
        outcomes = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    table, is_met = scores(outcomes)
    print(f"{table}\n{time.monotonic() - begun:.0f} s")
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
