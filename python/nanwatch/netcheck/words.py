"""Every line that netcheck prints."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Mapping, Sequence

from ..util.visible import visible
from .guard import Trouble
from .meeting import Arrival, Outcome, Place
from .steps import Transfer

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
        f"    try:  {_advice(trouble, place, backend)}",
    ]


def _advice(trouble: Trouble, place: Place, backend: str) -> str:
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
        f" nc -vz {place.master_addr} {place.master_port}",
        "store": "is MASTER_PORT free on the node of rank 0 and used by nothing else:"
        f" ss -ltnp | grep {place.master_port}; choose another one; a name server that does not answer delays it too",
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


def header_lines(arrivals: Sequence[Arrival], backend: str, timeout: float) -> list[str]:
    """The versions and the device of each rank, ranks of the same host and device in one line."""
    hosts = len({one.host for one in arrivals})
    ranks = "1 rank" if len(arrivals) == 1 else f"{len(arrivals)} ranks"
    lines = [
        f"netcheck: {ranks} on {hosts} {'host' if hosts == 1 else 'hosts'}, {backend}, {timeout:g} s for each step"
    ]
    versions = _grouped((one.versions, one.rank) for one in arrivals)
    if len(versions) == 1:
        lines += [f"    {what}" for what in versions]
    else:
        lines += [f"    {what} (ranks {spans(of)})" for what, of in versions.items()]
        lines.append("    WARNING: not all ranks have the same versions")
    devices = _grouped((f"{one.host}: {one.device}", one.rank) for one in arrivals)
    return lines + [f"    {what} (ranks {spans(of)})" for what, of in devices.items()]


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
    lines = [] if not found else [f"    {'all-reduce':>12} {'time':>12} {'algorithm':>12} {'bus':>12}"]
    for one in found:
        rates = (one.algorithm_rate(), one.bus_rate(world_size))
        cells = "".join(
            f" {f'{rate / 1e9:.2f} GB/s' if rate >= 1e9 else f'{rate / 1e6:.2f} MB/s':>12}" for rate in rates
        )
        lines.append(f"    {_bytes(one.num_bytes):>12} {one.seconds * 1e6:>9.1f} µs{cells}")
    return lines


def _bytes(number: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if number >= size and number % size == 0:
            return f"{number // size} {unit}"
    return f"{number} B"


def summary_line(outcomes: Mapping[int, Outcome], world_size: int) -> str:
    """How many are well, which are not, and which have not said a word."""
    troubles = {one.rank: one.trouble for one in outcomes.values() if one.trouble is not None}
    silent = [rank for rank in range(world_size) if rank not in outcomes]
    if not troubles and not silent:
        return (
            "netcheck: the only rank is OK" if world_size == 1 else f"netcheck: all {world_size} ranks are OK"
        )
    groups = {
        "broken": sorted(rank for rank, trouble in troubles.items() if not trouble.follows),
        "stopped by that": sorted(rank for rank, trouble in troubles.items() if trouble.follows),
        "not a word from": silent,
    }
    parts = [f"{what}: {spans(ranks)}" for what, ranks in groups.items() if ranks]
    return "; ".join([f"netcheck: {len(outcomes) - len(troubles)} of {world_size} ranks OK", *parts])


def say(lines: Iterable[str], descriptor: int) -> None:
    """Write the lines in one piece. A pipe keeps pieces of up to 4096 bytes whole among those of other ranks."""
    rest = "".join(f"{visible(line)}\n" for line in lines).encode()
    with contextlib.suppress(OSError):
        while rest:
            rest = rest[os.write(descriptor, rest) :]
