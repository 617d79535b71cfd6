"""Protocol by which ranks compare their replicas through the job's store, and the judgement of a difference.

While all is well a rank sends one compare-and-set of a digest at each check, and asks a few times whether anybody saw
another one. Nothing grows with the number of checks. After a difference the ranks of one digest send the fingerprints
behind it once, and one rank judges for all.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from .replicas import Print

if TYPE_CHECKING:
    from torch.distributed import Store  # type: ignore[attr-defined]

# Checks that ranks may be apart before one is compared with nobody.
_SLOTS = 8
# Digests whose fingerprints are looked at. More differ where each rank goes its own way.
_MOST_DIGESTS = 16
_MOST_RANKS = 8
_MOST_NAMES = 100

Prints = dict[str, Print]


def digest(prints: Prints, left_out: set[str]) -> str:
    """Return one hash of all fingerprints. A buffer counts only as long as nothing changes its bits."""
    found = blake2b(digest_size=12)
    for name, one in prints.items():
        if one.is_kept and name not in left_out:
            found.update(f"{name}\0{one.value:x}\0".encode(errors="backslashreplace"))
    return found.hexdigest()


class ReplicaProtocol:
    """Keys of one group of ranks that hold the same. No method waits for a rank."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._seen: dict[str, str] = {}
        self._number = 0  # of the difference that comes next

    def post(self, check: int, digest: str) -> bool:
        """Post the digest of the check of this number. Return False where its first rank posted another one."""
        slot = f"slot/{check % _SLOTS}"
        mine, held = f"{check} {digest}", self._seen.get(slot, "")
        while not held or int(held.partition(" ")[0]) < check:
            held = self._store.compare_set(slot, held, mine).decode()
        self._seen[slot] = held
        return held == mine or int(held.partition(" ")[0]) > check

    def tell_difference(self, check: int) -> None:
        """Tell the others that the digests of this check differ, unless somebody did."""
        self._store.compare_set(f"differ/{self._number}", "", str(check))

    def difference(self) -> int | None:
        """Return the number of the check whose digests differ, None as long as nobody says so."""
        key = f"differ/{self._number}"
        return int(self._store.get(key)) if self._store.check([key]) else None

    def report(self, digest: str, prints: Prints | None, host: str) -> bool:
        """Send what this rank had at that check, None where it has forgotten. Return whether all have reported."""
        if prints is not None:
            place = self._store.add(self._key(f"count/{digest}"), 1)
            if place <= _MOST_RANKS:
                self._store.set(self._key(f"rank/{digest}/{place}"), f"{self._rank} {host}")
            if place == 1:
                number = self._store.add(self._key("digests"), 1)
                if number <= _MOST_DIGESTS:
                    packed: Any = zlib.compress(json.dumps(prints).encode())
                    self._store.set(self._key(f"prints/{digest}"), packed)
                    self._store.set(self._key(f"digest/{number}"), digest)
        return bool(self._store.add(self._key("reported"), 1) == self._size)

    def judge(self) -> None:
        """Judge for all ranks, unless another one does or did."""
        if self._store.compare_set(self._key("judge"), "", str(self._rank)).decode() == str(self._rank):
            self.set("verdict", json.dumps(self.judged(self._sides())).encode())

    def judged(self, sides: list[Side]) -> dict[str, Any]:
        """Return the verdict on the sides of a difference."""
        return judge(sides)

    def _sides(self) -> list[Side]:
        sides = []
        for number in range(1, min(self._store.add(self._key("digests"), 0), _MOST_DIGESTS) + 1):
            digest = (self.get(f"digest/{number}") or b"").decode()
            packed = self.get(f"prints/{digest}")
            count = self._store.add(self._key(f"count/{digest}"), 0)
            said = [self.get(f"rank/{digest}/{i}") for i in range(1, min(count, _MOST_RANKS) + 1)]
            ranks = [word.decode().partition(" ") for word in said if word is not None]
            if packed is not None and ranks:
                loaded = json.loads(zlib.decompress(packed))
                prints = {name: Print(*one) for name, one in loaded.items()}
                sides.append(Side(count, [(int(rank), host) for rank, _, host in ranks], prints))
        return sides

    def end(self) -> None:
        """Go on to the next difference."""
        self._number += 1

    def _key(self, name: str) -> str:
        return f"{self._number}/{name}"

    def set(self, name: str, value: Any) -> None:
        """Set a value that belongs to the present difference."""
        self._store.set(self._key(name), value)

    def get(self, name: str) -> bytes | None:
        """Return a value that belongs to the present difference, None as long as there is none."""
        key = self._key(name)
        return bytes(self._store.get(key)) if self._store.check([key]) else None

    def agreed(self, name: str, value: int) -> int:
        """Return the number that the first rank gives for the present difference."""
        return int(self._store.compare_set(self._key(name), "", str(value)))

    def leave(self) -> None:
        """Count this rank as one that checks no more."""
        self._store.add("left", 1)

    def all_left(self) -> bool:
        """Return whether all ranks have left."""
        return bool(self._store.add("left", 0) >= self._size)


class Side(NamedTuple):
    """Ranks that had one digest: how many, the first of them with their hosts, and the fingerprints."""

    num_ranks: int
    ranks: list[tuple[int, str]]
    prints: Prints


def judge(sides: list[Side]) -> dict[str, Any]:
    """Return the names that differ, and the ranks that are odd by majority; no names where nothing should be told.

    The ranks are those of the first tensor that differs. A buffer is told only where its bits have stayed on most
    ranks, and changed on the others without another write: ranks may fill buffers of their own as they like.
    """
    total = sum(side.num_ranks for side in sides)
    common = [name for name in (sides[0].prints if sides else ()) if all(name in s.prints for s in sides)]
    found: list[tuple[str, list[Side], list[Side], bool]] = []
    own: list[str] = []
    for name in common:
        counts = Counter[int]()
        for side in sides:
            counts[side.prints[name].value] += side.num_ranks
        if len(counts) == 1:
            continue
        value, most = counts.most_common(1)[0]
        is_majority = 2 * most > total
        if sides[0].prints[name].kind == "buffer":
            kept = {side.prints[name].value for side in sides if side.prints[name].is_kept}
            if len(kept) != 1 or len({side.prints[name].writes for side in sides}) > 1:
                own.append(name)
                continue
            (value,), is_majority = kept, True
        most_sides = [side for side in sides if side.prints[name].value == value]
        found.append((name, [s for s in sides if s not in most_sides], most_sides, is_majority))
    names = [name for name, *_ in found]
    if not found:
        return {"names": [], "own": own}
    _, odd, most_sides, is_majority = found[0]
    told = odd if is_majority else sides
    ranks = sorted(rank for side in told for rank in side.ranks)[:_MOST_RANKS]
    return {
        "names": names[:_MOST_NAMES],
        "num": len(names),
        "own": own,
        "ranks": [rank for rank, _ in ranks],
        "hosts": [host for _, host in ranks],
        "num_odd": sum(side.num_ranks for side in told),
        "num_ranks": total,
        "is_majority": is_majority,
        "pair": [odd[0].ranks[0][0], most_sides[0].ranks[0][0]],
    }
