"""Save a checkpoint of DCP on two ranks, of which the second has a non-finite weight: FOLDER POLICY HOW GUARDS."""

import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import nanwatch


def main() -> None:
    number, folder, policy, how, guards = int(os.environ["RANK"]), Path(sys.argv[1]), *sys.argv[2:]
    warnings.simplefilter("always")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=number, world_size=2)
    model = nn.Linear(2, 2)
    state = {f"rank{number}": model.state_dict()}
    place = str(folder / "model")

    def save() -> None:
        if how == "now":
            dcp.save(state, checkpoint_id=place)
        else:
            kind = AsyncCheckpointerType[how]
            dcp.async_save(state, checkpoint_id=place, async_checkpointer_type=kind).result()

    is_guarded = guards == "both" or number == 1
    watch = nanwatch.watch(
        model, guard_checkpoints=is_guarded, on_nonfinite=policy, rerun=False, black_box=False
    )
    save()
    good = {path.name: path.read_bytes() for path in (folder / "model").iterdir()}
    dist.barrier()
    if number == 1:
        model.weight.data[0, 0] = torch.nan
    try:
        save()
        ended = "returned"
    except BaseException as error:
        ended = type(error).__name__
    dist.barrier()
    is_kept = good == {path.name: path.read_bytes() for path in (folder / "model").iterdir()}
    sys.stdout.write(f"{ended}\n{is_kept}\n")
    watch.stop()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
