"""The checks themselves: TCP connections to the neighbours, then the device and the backend.

Each function raises StepError or what torch raises. For the connections each rank listens on a port that the system
chose, as the backends do, and sends 64 KiB to whoever connects: more than a packet, so that a path on which only small
packets pass is seen.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from .guard import LinkError, StepError
from .meeting import Arrival, Meeting

_BYTES = 65536
# A lost SYN is sent again after 1, 3 and 7 s. A link that is silent for 10 is no link.
PATIENCE = 10.0
ALL_PAIRS = 32  # ranks, up to which every pair is tried
BACKENDS = ("nccl", "gloo")
_PATTERN = 0xA5
# 2 MiB of int64: enough to be cut into the pieces that a backend sends over several channels.
_ELEMENTS = 1 << 18
# The clock of netcheck is to end a step, not NCCL's own, which ends the process without a word of ours.
_NCCL_MARGIN = 120.0


def shifts(world_size: int, *, all_pairs: bool) -> list[int]:
    """The distances, in ranks, at which neighbours are: every one, or 1, 2, 4, … below the size of the world."""
    if all_pairs:
        return list(range(1, world_size))
    return [1 << bit for bit in range((world_size - 1).bit_length())]


class Listener:
    """Answers on a port of its own until the process ends, from any thread that connects."""

    def __init__(self, token: str) -> None:
        self._answer = token.encode().ljust(_BYTES, b".")
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        self._socket = socket.create_server(
            ("", 0), family=family, backlog=128, dualstack_ipv6=family == socket.AF_INET6
        )
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._serve, name="netcheck listener", daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._reply, args=(connection,), daemon=True).start()

    def _reply(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(PATIENCE)
            connection.sendall(self._answer)

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()


def connect(peers: Sequence[Arrival], master: str, patience: float) -> None:
    """Connect to all peers at once, for so many seconds. Raises LinkError that names each that did not answer."""

    def attempt(peer: Arrival) -> str:
        return _attempt(peer, peer.address or master, patience)

    with ThreadPoolExecutor(max_workers=min(ALL_PAIRS, max(1, len(peers)))) as pool:
        failures = [why for why in pool.map(attempt, peers) if why]
    if failures:
        more = f"; and {len(failures) - 4} more" if len(failures) > 4 else ""
        raise LinkError("; ".join(failures[:4]) + more)


def _attempt(peer: Arrival, address: str, patience: float) -> str:
    """Why the peer cannot be reached; "" when it can."""
    where = f"{peer.name} at {address} port {peer.port}"
    received = 0
    try:
        with socket.create_connection((address, peer.port), timeout=patience) as connection:
            connection.settimeout(patience)
            received = -1
            head = connection.recv(len(peer.token), socket.MSG_WAITALL)
            if head and head != peer.token.encode():
                return f"{where}: another program answers there; two hosts may have the same address"
            received = len(head)
            while received < _BYTES and (part := connection.recv(_BYTES)):
                received += len(part)
            if received < _BYTES:
                return f"{where}: closed the connection after {received} of {_BYTES} bytes"
            return ""
    except TimeoutError:
        if received == 0:
            return f"{where}: no answer, packets to it or from it are lost"
        return (
            f"{where}: connected, but {max(received, 0)} of {_BYTES} bytes came: large packets may be lost where"
            " small ones pass; compare the MTU of both interfaces"
        )
    except ConnectionRefusedError:
        return f"{where}: refused, it has ended or a firewall rejects the port"
    except OSError as error:
        return f"{where}: {error.strerror or error}"


def own_address(seen: str) -> str:
    """Return the address of the master as other ranks can use it; "" where it is valid on this machine only."""
    return "" if seen.startswith("127.") or seen == "::1" else seen


@dataclass(frozen=True, slots=True)
class Transfer:
    """One size of all-reduce: bytes per rank, how often, and the seconds that one took."""

    num_bytes: int
    iterations: int
    seconds: float

    def algorithm_rate(self) -> float:
        """Bytes per second that a rank gets reduced."""
        return self.num_bytes / self.seconds

    def bus_rate(self, world_size: int) -> float:
        """Bytes per second that each rank must have sent and received: 2 (n - 1) / n times the bytes, whatever n."""
        return self.algorithm_rate() * 2 * (world_size - 1) / world_size

    def entry(self, world_size: int) -> dict[str, float]:
        """Return the member of the JSON document."""
        return {
            "bytes": self.num_bytes,
            "iterations": self.iterations,
            "microseconds": self.seconds * 1e6,
            "algorithm_gb_per_s": self.algorithm_rate() / 1e9,
            "bus_gb_per_s": self.bus_rate(world_size) / 1e9,
        }


def choose_backend(wanted: str | None) -> str:
    """`wanted`, or nccl where there is a GPU for it and gloo otherwise."""
    if wanted is None:
        return "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    present = {"nccl": dist.is_nccl_available(), "gloo": dist.is_gloo_available()}
    if not present[wanted]:
        others = ", ".join(name for name, there in present.items() if there) or "none"
        raise StepError(f"this build of torch has no backend {wanted}; it has: {others}")
    if wanted == "nccl" and not torch.cuda.is_available():
        raise StepError("the backend nccl needs a GPU, and torch sees none here; --backend gloo does without")
    return wanted


def choose_device(backend: str, local_rank: int) -> torch.device:
    """The device of this rank, made the current one."""
    if backend != "nccl":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if local_rank >= count:
        raise StepError(
            f"local rank {local_rank} has no GPU: torch sees {count} here"
            f" (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')})"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """As a line shows it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {len(os.sched_getaffinity(0))} cores" if hasattr(os, "sched_getaffinity") else "cpu"


def versions(backend: str) -> str:
    """What must be the same on all ranks."""
    parts = [f"torch {torch.__version__}"]
    if backend == "nccl":
        parts += [f"CUDA {torch.version.cuda}", f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"]
    return ", ".join(parts)


def allocate(device: torch.device, num_bytes: int) -> None:
    """Take memory on the device, write all of it and read it back."""
    try:
        block = torch.full((num_bytes,), _PATTERN, dtype=torch.uint8, device=device)
        wrong = int((block != _PATTERN).sum())
    except (torch.OutOfMemoryError, RuntimeError) as error:
        raise StepError(f"{num_bytes} bytes on {device}: {str(error).splitlines()[0]}") from error
    if wrong:
        raise StepError(
            f"{wrong} of {num_bytes} bytes on {device} read back as something else than was written"
        )


def begin(meeting: Meeting, backend: str, device: torch.device, timeout: float) -> None:
    """Make the default process group, connected at once where the backend can."""
    place = meeting.place
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", meeting.store),  # type: ignore[attr-defined]
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=timeout if backend == "gloo" else timeout + _NCCL_MARGIN),
        device_id=device if backend == "nccl" else None,
    )


def barrier(device: torch.device, remaining: float) -> None:
    """Wait for all ranks."""
    if device.type == "cpu":
        dist.monitored_barrier(timeout=timedelta(seconds=remaining), wait_all_ranks=True)
    else:
        dist.barrier(device_ids=[device.index])
        torch.cuda.synchronize(device)


def all_reduce(device: torch.device) -> None:
    """A sum over all ranks whose every element is known."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pattern = torch.arange(_ELEMENTS, dtype=torch.int64, device=device) % 1009
    given = pattern * (rank + 1)
    dist.all_reduce(given)
    expected = pattern * (world_size * (world_size + 1) // 2)
    _compare(given, expected, "the sum over all ranks")


def point_to_point(device: torch.device, shifts: Sequence[int], tell: Callable[[str], None]) -> None:
    """For each distance: send to the rank so far behind, receive from the one so far ahead, and check each element.

    `tell` is given the pair in words before its turn.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pattern = torch.arange(_ELEMENTS, dtype=torch.int64, device=device)
    for shift in shifts:
        to, origin = (rank + shift) % world_size, (rank - shift) % world_size
        tell(f"sending to rank {to}, receiving from rank {origin}")
        received = torch.full_like(pattern, -1)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, pattern + rank, to), dist.P2POp(dist.irecv, received, origin)]
        )
        for work in works:
            work.wait()
        _compare(received, pattern + origin, f"what rank {origin} sent")


def transfers(device: torch.device, sizes: Sequence[int], tell: Callable[[str], None]) -> list[Transfer]:
    """How long all-reduces of these sizes (bytes, float32) take, the first few of each not counted."""
    found = []
    for size in sizes:
        elements = max(1, size // 4)
        tell(f"all-reduce of {elements * 4} bytes")
        # The same number on all ranks, without a word between them; 1 MiB takes milliseconds even at 1 Gbit/s.
        iterations = 20 if size <= 1 << 20 else 5
        block = torch.zeros(elements, dtype=torch.float32, device=device)
        for _ in range(3):
            dist.all_reduce(block)
        _settle(block)
        start = time.perf_counter()
        for _ in range(iterations):
            dist.all_reduce(block)
        _settle(block)
        found.append(Transfer(elements * 4, iterations, (time.perf_counter() - start) / iterations))
    return found


def _settle(x: torch.Tensor) -> None:
    if x.device.type == "cuda":
        torch.cuda.synchronize(x.device)


def _compare(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    wrong = got != expected
    number = int(wrong.sum())
    if number:
        first = int(wrong.nonzero()[0])
        raise StepError(
            f"{what} is wrong in {number} of {got.numel()} elements: element {first} is {int(got[first])}"
            f" and should be {int(expected[first])}"
        )
