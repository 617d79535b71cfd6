"""ReplicaDifference: ranks that should hold the same bits, and do not."""

from __future__ import annotations

from dataclasses import dataclass

from ..util.job import spell_runs
from ..util.visible import visible


@dataclass(frozen=True, slots=True)
class Distance:
    """How far apart two sides are: one rank's bits of a tensor, and another's, at optimizer step `step`.

    `num_differing` of `numel` elements differ, at least so many unless `is_all`. `largest` is the largest absolute
    difference, None where one side is not a number. `bits` are the numbers of the bits that differ in any element,
    counted from 0, the lowest.
    """

    step: int
    num_differing: int
    numel: int
    largest: float | None
    bits: tuple[int, ...]
    is_all: bool = True

    def __str__(self) -> str:
        return f"{self.extent}, at step {self.step}"

    @property
    def extent(self) -> str:
        """How many elements differ, by how much and in which bits."""
        some = "" if self.is_all else "at least "
        verb = "differs" if self.num_differing == 1 else "differ"
        far = "" if self.largest is None else f", by at most {self.largest:.3g}"
        bits = f", in bit {spell_runs(self.bits)}" if self.bits else ""
        return f"{some}{self.num_differing:,} of {self.numel:,} elements {verb}{far}{bits}"


@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """Tensors that ranks should hold alike to the bit, and do not, as found at a check.

    `step` is the check's, in batches that followed a step of the optimizer, and `equal_at` the step of the check before
    it. `began` is the first batch whose kept fingerprints differ, None without them. `tensors` has the first hundred
    names of `num_tensors`. `ranks` are the first odd ones of `num_odd`, by majority of `num_ranks` that answered of
    `size`; where there `is_majority` is False, they are all candidates. `hosts` are theirs. `pair` are the two ranks
    whose bits of the first tensor are compared in `distance`, and kept in `files`.
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
    pair: tuple[int, int]
    batch: int = 0
    began: int | None = None
    distance: Distance | None = None
    files: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"replicas differ at step {self.step}: {self._what}; {'; '.join(self._details)}"

    @property
    def _what(self) -> str:
        more = f" and {self.num_tensors - 1:,} more tensors" if self.num_tensors > 1 else ""
        where = (
            f"rank {spell_runs(self.ranks)}" if self.num_odd <= len(self.ranks) else f"{self.num_odd} ranks"
        )
        hosts = ", ".join(dict.fromkeys(map(visible, self.hosts)))
        name = f"{visible(self.tensors[0])}{more}"
        if not self.is_majority:
            return f"{name} on one of rank {spell_runs(self.ranks)} ({hosts}); no majority says on which"
        others = self.num_ranks - self.num_odd
        return f"{name} on {where} ({hosts}), which {others} other rank{'s' * (others > 1)} hold alike"

    @property
    def _details(self) -> list[str]:
        began = (
            f"began after step {self.equal_at}"
            if self.began is None
            else f"first seen in batch {self.began}, after step {self.equal_at}"
        )
        found = [began]
        if self.distance is not None:
            found.append(str(self.distance))
        if self.num_ranks < self.size:
            found.append(f"{self.size - self.num_ranks} of {self.size} ranks did not answer in time")
        if self.files:
            found.append(f"bytes in {visible(self.files[0])}")
        return found
