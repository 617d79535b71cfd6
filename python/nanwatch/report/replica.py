"""ReplicaDifference: ranks that should hold the same bits, and do not."""

from __future__ import annotations

from dataclasses import dataclass

from ..util.job import spell_runs
from ..util.visible import visible


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """Tensors that ranks should hold alike to the bit, and do not, as found at a check.

    `step` is the check's, in batches that followed a step of the optimizer, `equal_at` the step of the check before
    it, and `batch` the batch that it began. `tensors` has the first hundred names of `num_tensors`. `ranks` are the
    first odd ones of `num_odd`, by majority of `num_ranks` that answered of `size`; where there `is_majority` is False,
    they are all candidates. `hosts` are theirs.
    """

    step: int
    equal_at: int
    tensors: tuple[str, ...]
    num_tensors: int
    ranks: tuple[int, ...]
    num_odd: int
    hosts: tuple[str, ...]
    num_ranks: int
    size: int
    is_majority: bool
    batch: int = 0

    def __str__(self) -> str:
        more = f" and {self.num_tensors - 1:,} more tensors" if self.num_tensors > 1 else ""
        name = f"{visible(self.tensors[0])}{more}"
        hosts = ", ".join(dict.fromkeys(map(visible, self.hosts)))
        ranks = f"rank {spell_runs(self.ranks)}"
        if not self.is_majority:
            where = f"{name} on one of {ranks} ({hosts}); no majority says on which"
        else:
            count = self.num_ranks - self.num_odd
            odd = ranks if self.num_odd <= len(self.ranks) else f"{self.num_odd} ranks"
            where = f"{name} on {odd} ({hosts}), which {count} other rank{'s' * (count > 1)} hold alike"
        text = f"replicas differ at step {self.step}: {where}; began after step {self.equal_at}"
        if self.num_ranks < self.size:
            text += f"; {self.size - self.num_ranks} of {self.size} ranks did not answer in time"
        return text
