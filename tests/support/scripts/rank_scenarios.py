"""Small jobs of real ranks, one after another in the same processes: each fails, and each rank prints what it is told.

    torchrun --nproc_per_node 2 rank_scenarios.py SCENARIOS.json OUTPUT_DIR

A scenario is {"way", "kind", "rank", "batch", "port"}; without a port the job's store is the launcher's, and with
"attempt" it is played by that start of an elastic job alone. Its reports go into "folder", or its number. A line is
printed a rank and scenario, as JSON; one more when a rank is told while it waits in a collective. After the last
scenario the error ends the process.
"""

import gc
import json
import os
import signal
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import nanwatch
from nanwatch.ranks import consensus
from nanwatch.ranks.consensus import OriginConsensus, PeerNonFiniteError
from support.parallel_models import shard, split
from support.watching import watch

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ATTEMPT = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
WIDTH = 8


class Block(nn.Module):
    """`gain` is 1 but where a scenario wants half precision to overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.gain = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return self.down(torch.tanh(self.up(x)) * self.gain).float()


def step_of(scenario: dict, watched: list[nanwatch.Watch], options: dict[str, object]):
    """A step of training as (x, factor of the loss) -> None, and the blocks of this rank."""
    way = scenario["way"]
    torch.manual_seed(0)
    blocks = [Block() for _ in range(WORLD if way == "pipeline" else 2)]
    group, number, stages = None, RANK, WORLD
    if scenario["kind"] == "backward":
        with torch.no_grad():
            blocks[-1].down.weight.mul_(64)  # what comes out of its backward is larger than what goes in
    if way == "stages":  # two, of several ranks each
        mesh = init_device_mesh("cpu", (2, WORLD // 2), mesh_dim_names=("pp", "dp"))
        group, number, stages = mesh.get_group("pp"), mesh.get_local_rank("pp"), 2
        shard(blocks[number], (), mesh["dp"])
    if way in ("pipeline", "stages"):
        mine = blocks[number]
        watched.append(watch(mine, **options))
        stage = PipelineStage(mine, number, stages, torch.device("cpu"), group=group)
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda y, target: (y - target).square().mean())
        optimizer = torch.optim.SGD(mine.parameters(), 0.01)

        def step(x: torch.Tensor, factor: float) -> None:
            given = (x,) if number == 0 else ()
            is_last = number == stages - 1
            schedule.step(*given, **({"target": torch.zeros(len(x), WIDTH)} if is_last else {}))
            optimizer.step()
            optimizer.zero_grad()

        return step, [mine]
    model: nn.Module = nn.Sequential(*blocks)
    run: nn.Module = model
    if way == "ddp":
        run = DistributedDataParallel(model)
    elif way == "fsdp2":
        run = shard(model, blocks, init_device_mesh("cpu", (WORLD,), mesh_dim_names=("dp",)))
    else:
        split(blocks, init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",)))
    watched.append(watch(model, **options))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(x: torch.Tensor, factor: float) -> None:
        (run(x).square().mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, blocks


def begin(port: int | None) -> None:
    """Begin the process group, with a store of its own at this port or with the launcher's."""
    if port is not None:
        gloo_store = dist.TCPStore("127.0.0.1", port, WORLD, is_master=not RANK)
    else:
        kept = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
        # The launcher's outlives a failed attempt, whose addresses gloo would find there and call in vain. So only
        # gloo is given a part of it that is new.
        gloo_store = dist.PrefixStore(f"gloo/{ATTEMPT}", kept)
        consensus.default_store = lambda: kept
    dist.init_process_group("gloo", store=gloo_store, rank=RANK, world_size=WORLD)


def play(scenario: dict, folder: Path) -> tuple[dict, Exception | None]:
    way, kind, at = scenario["way"], scenario["kind"], scenario["batch"]
    is_guilty = kind == "all" or (kind != "healthy" and scenario["rank"] == RANK)
    begin(scenario["port"])
    watched: list[nanwatch.Watch] = []
    told: dict[str, object] = {"rank": RANK, "error": None}
    # Every rank of a tensor-parallel group and the first stage of a pipeline have the same data.
    draw = torch.Generator().manual_seed(0 if way == "tp" or kind == "all" else RANK)
    options = {"peer_timeout": 6, "output_dir": folder, "act_at": scenario.get("act_at", "auto")}
    options["gradients"] = kind == "backward"
    if scenario.get("dies") and scenario["rank"] == RANK:
        # Once it has told the others and has written its report down.
        OriginConsensus.settle = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    ended_by = None
    try:
        step, blocks = step_of(scenario, watched, options)
        with watched[0]:
            for batch in range(at + 20):
                x, factor = torch.randn(4, WIDTH, generator=draw), 1.0
                if batch == at:
                    if is_guilty and kind == "data":
                        x[1, 2] = float("nan")
                    elif is_guilty and kind == "backward":
                        factor = 5e3
                    elif is_guilty:
                        blocks[-1].gain = 1e6
                    elif kind == "straggler":
                        time.sleep(2.5)
                elif kind == "healthy":
                    time.sleep(0.1)  # so long that it looks for news, once a second
                step(x, factor)
    except (nanwatch.NonFiniteError, RuntimeError) as caught:
        # A pipeline puts an error of its own before what its stage raised.
        error = caught.__cause__ if isinstance(caught.__cause__, nanwatch.NonFiniteError) else caught
        if not isinstance(error, nanwatch.NonFiniteError):
            raise
        ended_by = error if scenario.get("exits") else None
        first = error.origin.first if error.origin is not None else None
        told |= {
            "error": type(error).__name__,
            "is_peer": isinstance(error, PeerNonFiniteError),
            "said": str(error.origin),
            "origin": first and [first.rank, first.module, first.kind, first.label, error.origin.num_alike],
        }
    if scenario.get("exits"):
        return told, ended_by
    # A wrapper that lives on keeps its connections open, and those who wait for this rank waiting.
    step = blocks = error = None
    gc.collect()
    dist.destroy_process_group()
    return told | {"is_destroyed": True}, ended_by


def say(what: dict) -> None:
    sys.stdout.write(f"{json.dumps(what)}\n")
    sys.stdout.flush()


def main() -> None:
    error = None
    for number, scenario in enumerate(json.loads(Path(sys.argv[1]).read_text())):
        if scenario.get("attempt", ATTEMPT) != ATTEMPT:
            continue

        def show(message: object, *_: object, number: int = number) -> None:
            if "waits for a rank" in str(message):
                say({"scenario": number, "rank": RANK, "said": str(message)})

        warnings.simplefilter("always")
        warnings.showwarning = show
        told, error = play(scenario, Path(sys.argv[2]) / scenario.get("folder", str(number)))
        say({"scenario": number, **told})
    if error is not None:
        raise error


main()
