"""HardwareSuspect: a module call that gave other bits when it was made again."""

from __future__ import annotations

from dataclasses import dataclass

from ..util.visible import module_name, visible
from .replica import Distance


@dataclass(frozen=True, slots=True)
class HardwareSuspect:
    """Call whose output has other bits than the same call made again, twice alike, from the same input.

    `device` is the tensor's, with the name of a GPU. `distance` is between both outputs; its `step` is the batch.
    """

    batch: int
    module: str
    class_name: str
    rank: int
    host: str
    device: str
    distance: Distance

    def __str__(self) -> str:
        where = f"{module_name(self.module)} ({visible(self.class_name)}) in batch {self.batch}"
        return (
            f"suspect of hardware: {where} gave other bits than the same call made again, on rank {self.rank}, host"
            f" {visible(self.host)}, {visible(self.device)}: {self.distance.extent}"
        )
