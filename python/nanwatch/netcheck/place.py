"""Who this rank is and where the others are to be met, from what torchrun or SLURM put into the environment."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from dataclasses import dataclass

from ..report.attempt import store_key

_MAX_PORT = 65535

START = (
    "start it with torchrun (torchrun --nproc_per_node 2 -m nanwatch.netcheck), with srun and MASTER_ADDR and"
    " MASTER_PORT set, or set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT by hand"
)


class PlaceError(ValueError):
    """The environment does not say who this rank is; the text says what is missing or wrong."""


@dataclass(frozen=True, slots=True)
class Place:
    """A rank: its numbers, its host, and the address and port of the store where all ranks meet.

    `hosts_store` is True where this process has to open the store itself. `attempt` tells one start of the job from
    another that meets in the same store.
    """

    rank: int
    world_size: int
    local_rank: int
    host: str
    master_addr: str
    master_port: int
    hosts_store: bool
    attempt: str

    @property
    def name(self) -> str:
        """`host-localrank`."""
        return f"{self.host}-{self.local_rank}"

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Place:
        """The place that the variables say. Raises PlaceError."""
        if not environment.get("RANK") and environment.get("SLURM_PROCID"):
            numbers = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        else:
            numbers = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        required = [*numbers[:2], "MASTER_ADDR", "MASTER_PORT"]
        missing = [name for name in required if not environment.get(name)]
        if missing:
            raise PlaceError(f"{', '.join(missing)} not set; {START}")
        rank, world_size = (_number(environment, name) for name in numbers[:2])
        # By hand, with one rank a host, nobody sets it.
        local_rank = _number(environment, numbers[2]) if environment.get(numbers[2]) else 0
        if rank >= world_size:
            raise PlaceError(
                f"{numbers[0]}={rank} with {numbers[1]}={world_size}: ranks count from 0 to {world_size - 1}"
                if world_size
                else f"{numbers[1]}=0: there is no rank at all"
            )
        port = _number(environment, "MASTER_PORT")
        if not 0 < port <= _MAX_PORT:
            raise PlaceError(f"MASTER_PORT={port}: a port is a number from 1 to {_MAX_PORT}")
        agent_has_store = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return cls(
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            host=socket.gethostname(),
            master_addr=environment["MASTER_ADDR"],
            master_port=port,
            hosts_store=rank == 0 and not agent_has_store,
            attempt=store_key(environment),
        )


def _number(environment: Mapping[str, str], name: str) -> int:
    given = environment[name]
    # isdigit is True for more than int() reads; a port of 5,000 digits is no port.
    if not (given.isascii() and given.isdigit() and len(given) < 10):
        raise PlaceError(f"{name} should be a whole number, not negative, got {given[:60]!r}")
    return int(given)
