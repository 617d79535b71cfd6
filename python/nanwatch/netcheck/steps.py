"""The checks: TCP connections to the neighbours, then the device and the backend; and what to try after a failure.

Each function raises StepError or an error of torch. For the connections each rank listens on a port that the system
chose, as the backends do, and sends 64 KiB to whoever connects. That is more than a packet, which finds a path where
only small packets pass.
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

from .meeting import Arrival, LinkError, Meeting, Member, StepError, Trouble

_BYTES = 65536
# TCP repeats a lost SYN after 1, 3 and 7 s. A link that is silent for 10 s is no link.
PATIENCE = 10.0
ALL_PAIRS = 32  # ranks up to which every pair is tried
BACKENDS = ("nccl", "gloo")
_PATTERN = 0xA5
# 2 MiB of int64: enough to be cut into the pieces that a backend sends over several channels.
_ELEMENTS = 1 << 18
# Added to NCCL's timeout, so that netcheck's own clock ends a step first: NCCL would end the process without a message
# of netcheck.
_NCCL_MARGIN = 120.0


def shifts(world_size: int, *, all_pairs: bool) -> list[int]:
    """Return the distances to neighbours, in ranks: every one, or 1, 2, 4, … below the size of the world."""
    if all_pairs:
        return list(range(1, world_size))
    return [1 << bit for bit in range((world_size - 1).bit_length())]


class Listener:
    """Server that sends 64 KiB, beginning with `token`, to everybody who connects, until the process ends."""

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
        """Stop listening."""
        self._socket.close()


def connect(peers: Sequence[Arrival], master: str, patience: float) -> None:
    """Connect to all peers at once, for so many seconds. Raises LinkError that names those that did not answer."""

    with ThreadPoolExecutor(max_workers=min(ALL_PAIRS, max(1, len(peers)))) as pool:
        attempts = pool.map(lambda peer: _attempt(peer, peer.address or master, patience), peers)
        failures = [why for why in attempts if why]
    if failures:
        more = f"; and {len(failures) - 4} more" if len(failures) > 4 else ""
        raise LinkError("; ".join(failures[:4]) + more)


def _attempt(peer: Arrival, address: str, patience: float) -> str:
    """Return why the peer cannot be reached; "" when it can."""
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


@dataclass(frozen=True, slots=True)
class Transfer:
    """Timing of one size of all-reduce: bytes per rank, how often, and the seconds that one took."""

    num_bytes: int
    iterations: int
    seconds: float

    def rates(self, world_size: int) -> tuple[float, float]:
        """Return the bytes per second that a rank gets reduced, and those that it must have sent and received.

        Of these there are 2 (n - 1) / n times as many.
        """
        algorithm = self.num_bytes / self.seconds
        return algorithm, algorithm * 2 * (world_size - 1) / world_size

    def entry(self, world_size: int) -> dict[str, float]:
        """Return the member of the JSON document."""
        algorithm, bus = self.rates(world_size)
        return {
            "bytes": self.num_bytes,
            "iterations": self.iterations,
            "microseconds": self.seconds * 1e6,
            "algorithm_gb_per_s": algorithm / 1e9,
            "bus_gb_per_s": bus / 1e9,
        }


def choose_backend(wanted: str | None) -> str:
    """Return `wanted`, or nccl where there is a GPU for it and gloo otherwise."""
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
    """Return the device of this rank, and make it the current one."""
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
    """Return the name of the device for a line."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {len(os.sched_getaffinity(0))} cores" if hasattr(os, "sched_getaffinity") else "cpu"


def versions(backend: str) -> str:
    """Return the versions that must be the same on all ranks."""
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
    """Make the default process group, and connect at once where the backend can."""
    member = meeting.member
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", meeting.store),  # type: ignore[attr-defined]
        rank=member.rank,
        world_size=member.world_size,
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
    """Sum known numbers over all ranks, and compare each element of the sum."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    pattern = torch.arange(_ELEMENTS, dtype=torch.int64, device=device) % 1009
    given = pattern * (rank + 1)
    dist.all_reduce(given)
    expected = pattern * (world_size * (world_size + 1) // 2)
    _compare(given, expected, "the sum over all ranks")


def point_to_point(device: torch.device, shifts: Sequence[int], tell: Callable[[str], None]) -> None:
    """For each distance send to the rank after this one, receive from the rank before it, and check each element.

    `tell` gets each pair in words before its turn.
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
    """Time all-reduces of these sizes (bytes, float32), without the first few of each."""
    found = []
    for size in sizes:
        elements = max(1, size // 4)
        tell(f"all-reduce of {elements * 4} bytes")
        # All ranks must choose the same number without a message. 1 MiB takes milliseconds even at 1 Gbit/s.
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


def transfer_lines(found: Sequence[Transfer], world_size: int) -> list[str]:
    """Return the table of the all-reduce: time of one, bytes reduced per second, bytes on the wire per second."""
    lines = [] if not found else [f"    {'all-reduce':>12} {'time':>12} {'algorithm':>12} {'bus':>12}"]
    for one in found:
        cells = "".join(
            f" {f'{rate / 1e9:.2f} GB/s' if rate >= 1e9 else f'{rate / 1e6:.2f} MB/s':>12}"
            for rate in one.rates(world_size)
        )
        lines.append(f"    {_bytes(one.num_bytes):>12} {one.seconds * 1e6:>9.1f} µs{cells}")
    return lines


def _bytes(number: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= size and number % size == 0:
            return f"{number // size} {unit}"
    return f"{number} B"


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


_SIGNS_OF_DEATH = ("onnection reset by peer", "onnection closed by peer", "has gone")


def advice(trouble: Trouble, member: Member, backend: str) -> str:
    """Return what to try after the trouble."""
    if "stopped by SIG" in trouble.why:
        return "see which rank ended first: its lines, or in the summary the ranks without a word"
    if "failed first" in trouble.why:
        return "cure that rank first; its own lines say how"
    if any(sign in trouble.why for sign in _SIGNS_OF_DEATH):
        return (
            "a process has ended: the summary names ranks without a word; look in their logs, and with dmesg for the"
            " out-of-memory killer"
        )
    if "large packets" in trouble.why:
        return "compare the mtu of `ip link` on both hosts and the switches between; ping -M do -s 1472 <address>"
    others = [name for _, name in socket.if_nameindex() if name != "lo"]
    interface = f"choose the interface: {backend.upper()}_SOCKET_IFNAME={'|'.join(others) or '<name>'}"
    holder = (
        "nvidia-smi shows who holds the GPU" if backend == "nccl" else "free -h shows who holds the memory"
    )
    of_step = {
        "backend": "compare what torch sees on each node: nanwatch doctor",
        "master": "is MASTER_ADDR the node of rank 0, is rank 0 running, does a firewall let the port through:"
        f" nc -vz {member.master_addr} {member.master_port}",
        "store": "is MASTER_PORT free on the node of rank 0 and used by nothing else:"
        f" ss -ltnp | grep {member.master_port}; choose another one; a name server that does not answer delays it too",
        "device": f"{holder}; --memory takes less",
        "arrival": "start the ranks that are missing; compare --nnodes, --nproc_per_node, RANK and WORLD_SIZE on all"
        " nodes; a slow file system may need a longer --timeout",
        "links": "open the ports of /proc/sys/net/ipv4/ip_local_port_range between the nodes; where the address"
        f" is of the wrong network, {interface}",
    }
    if trouble.step in of_step:
        return of_step[trouble.step]
    if backend == "nccl":
        return (
            f"NCCL_DEBUG=INFO shows what NCCL tries; {interface}; NCCL_IB_DISABLE=1 does without InfiniBand,"
            " NCCL_P2P_DISABLE=1 without copies from GPU to GPU: what then works names the part that does not"
        )
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return f"{interface}; this host's own name has no address, and gloo asks for it"
    if address.startswith("127."):
        return f"{interface}; this host's own name means {address}, which gloo would tell the others"
    return interface
