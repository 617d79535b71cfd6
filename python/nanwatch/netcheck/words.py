"""Every line that netcheck prints: pure functions, and the one that writes so that no two ranks mix their lines."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence

from ..util.visible import visible
from .guard import Trouble
from .meeting import Arrival, Verdict
from .place import Place
from .steps import Transfer

_LOCK_PATIENCE = 1.0  # seconds; a rank that is stopped while it has its turn must not stop the others
_SIOCGIFADDR = 0x8915
_SIGNS_OF_DEATH = ("onnection reset by peer", "onnection closed by peer", "has gone")


def ok_line(place: Place) -> str:
    """`[host-0] is OK (global rank: 0/4)`."""
    return f"[{place.name}] is OK (global rank: {place.rank}/{place.world_size})"


def broken_lines(place: Place, trouble: Trouble, backend: str) -> list[str]:
    """The rank, the step, why, and what to try."""
    return [
        f"[{place.name}] is broken (global rank: {place.rank}/{place.world_size})",
        f"    step: {trouble.step}",
        f"    why:  {trouble.why}",
        f"    try:  {advice(trouble, place, backend)}",
    ]


def advice(trouble: Trouble, place: Place, backend: str) -> str:
    """What to try after this step has failed."""
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
    master = f"{place.master_addr} {place.master_port}"
    steps = {
        "backend": "compare what torch sees on each node: nanwatch doctor",
        "master": f"is MASTER_ADDR the node of rank 0, is rank 0 running, does a firewall let the port through:"
        f" nc -vz {master}",
        "store": f"is MASTER_PORT free on the node of rank 0 and used by nothing else:"
        f" ss -ltnp | grep {place.master_port}; choose another one; a name server that does not answer delays it too",
        "device": "nvidia-smi shows who holds the GPU; --memory takes less"
        if backend == "nccl"
        else "free -h shows who holds the memory; --memory takes less",
        "arrival": "start the ranks that are missing; compare --nnodes, --nproc_per_node, RANK and WORLD_SIZE on all"
        " nodes; a slow file system may need a longer --timeout",
        "links": "open the ports of /proc/sys/net/ipv4/ip_local_port_range between the nodes; where the address"
        f" is of the wrong network, choose the interface: {_interface_variable(backend)}",
    }
    if trouble.step in steps:
        return steps[trouble.step]
    if backend == "nccl":
        return (
            "NCCL_DEBUG=INFO shows what NCCL tries; choose the interface: "
            f"{_interface_variable(backend)}; NCCL_IB_DISABLE=1 does without InfiniBand, NCCL_P2P_DISABLE=1 without"
            " copies from GPU to GPU: what then works names the part that does not"
        )
    return f"choose the interface: {_interface_variable(backend)}{_loopback_remark()}"


def _interface_variable(backend: str) -> str:
    names = [name for name, address in interfaces() if not address.startswith("127.")]
    choice = names[0] if len(names) == 1 else "|".join(names) or "<name>"
    return f"{'NCCL' if backend == 'nccl' else 'GLOO'}_SOCKET_IFNAME={choice}"


def _loopback_remark() -> str:
    try:
        address = socket.gethostbyname(socket.gethostname())
    except OSError:
        return "; this host's own name has no address, and gloo asks for it"
    if address.startswith("127."):
        return f"; this host's own name means {address}, which gloo would tell the others"
    return ""


def interfaces() -> list[tuple[str, str]]:
    """The network interfaces of this host that have an IPv4 address: name and address."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append((name, socket.inet_ntoa(answer[20:24])))
    return found


def header_lines(arrivals: Sequence[Arrival], backend: str, timeout: float) -> list[str]:
    """The versions and the device of each rank, ranks of the same host and device in one line."""
    hosts = len({one.host for one in arrivals})
    ranks = "1 rank" if len(arrivals) == 1 else f"{len(arrivals)} ranks"
    lines = [
        f"netcheck: {ranks} on {hosts} {'host' if hosts == 1 else 'hosts'}, {backend}, {timeout:g} s for each step"
    ]
    versions = _grouped((one.versions, one.rank) for one in arrivals)
    lines += [
        f"    {what}" + (f" (ranks {spans(of)})" if len(versions) > 1 else "")
        for what, of in versions.items()
    ]
    if len(versions) > 1:
        lines.append("    WARNING: not all ranks have the same versions")
    devices = _grouped((f"{one.host}: {one.device}", one.rank) for one in arrivals)
    lines += [f"    {what} (ranks {spans(of)})" for what, of in devices.items()]
    return lines


def _grouped(pairs: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for what, rank in pairs:
        groups.setdefault(what, []).append(rank)
    return groups


def spans(numbers: Sequence[int], most: int = 8) -> str:
    """`0-3, 5, 8-9`: runs of sorted numbers, at most so many of them."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:most]]
    left = sum(last - first + 1 for first, last in runs[most:])
    return ", ".join(shown) + (f" and {left} more" if left else "")


def transfer_lines(found: Sequence[Transfer], world_size: int) -> list[str]:
    """The table of the all-reduce: time of one, bytes reduced a second, bytes on the wire a second."""
    lines = [f"    {'all-reduce':>12} {'time':>12} {'algorithm':>12} {'bus':>12}"]
    for one in found:
        rates = (one.algorithm_rate(), one.bus_rate(world_size))
        lines.append(
            f"    {_bytes(one.num_bytes):>12} {one.seconds * 1e6:>9.1f} µs"
            + "".join(f" {_rate(rate):>12}" for rate in rates)
        )
    return lines


def _rate(bytes_per_second: float) -> str:
    unit, size = ("GB/s", 1e9) if bytes_per_second >= 1e9 else ("MB/s", 1e6)
    return f"{bytes_per_second / size:.2f} {unit}"


def _bytes(number: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= size and number % size == 0:
            return f"{number // size} {unit}"
    return f"{number} B"


def summary_line(verdicts: dict[int, Verdict], world_size: int) -> str:
    """How many are well, which are not, and which have not said a word."""
    troubles = {one.rank: one.trouble for one in verdicts.values() if one.trouble is not None}
    broken = sorted(rank for rank, trouble in troubles.items() if not trouble.follows)
    stopped = sorted(rank for rank, trouble in troubles.items() if trouble.follows)
    silent = [rank for rank in range(world_size) if rank not in verdicts]
    if not troubles and not silent:
        return (
            "netcheck: the only rank is OK" if world_size == 1 else f"netcheck: all {world_size} ranks are OK"
        )
    parts = [f"{len(verdicts) - len(troubles)} of {world_size} ranks OK"]
    if broken:
        parts.append(f"broken: {spans(broken)}")
    if stopped:
        parts.append(f"stopped by that: {spans(stopped)}")
    if silent:
        parts.append(f"not a word from: {spans(silent)}")
    return "netcheck: " + "; ".join(parts)


def say(lines: Iterable[str], descriptor: int) -> None:
    """Write the lines as one piece, when no other rank of this user on this host does."""
    rest = "".join(f"{visible(line)}\n" for line in lines).encode()
    with _turn(), contextlib.suppress(OSError):
        while rest:
            rest = rest[os.write(descriptor, rest) :]


@contextlib.contextmanager
def _turn() -> Iterator[None]:
    path = os.path.join(tempfile.gettempdir(), f"nanwatch-netcheck-{os.getuid()}.lock")
    try:
        file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        yield  # lines of up to 4096 bytes are whole on a pipe without it
        return
    try:
        until = time.monotonic() + _LOCK_PATIENCE
        while time.monotonic() < until:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                time.sleep(0.005)
        yield
    finally:
        os.close(file)
