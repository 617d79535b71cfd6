"""The options of netcheck, its steps in their order, its lines, and its exit status."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from ..util.job import spell_runs
from ..util.visible import suppressing, visible
from . import steps
from .meeting import GRACE, Arrival, Guard, LinkError, Meeting, Member, NoRankError, StepError, Trouble, reach
from .steps import Listener, Transfer

_STDOUT, _STDERR = 1, 2
_LOOK_AROUND = 1.5  # seconds; less than GRACE, in which the others are still there to answer
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_EXAMPLES = """\
Every rank prints one line, `[host-localrank] is OK (global rank: r/w)`, or `is broken` with the step that failed, why,
and what to try; rank 0 prints versions, devices and the all-reduce table besides.

exit status, of every rank: 0 when all ranks are well, 1 when one is not, 2 when it could not be started

examples:
  torchrun --nproc_per_node 8 -m nanwatch.netcheck                    one node
  torchrun --nproc_per_node 8 --nnodes 4 --rdzv_backend c10d \\
      --rdzv_endpoint node1:29500 -m nanwatch.netcheck                 four, the same on each
  torchrun --nproc_per_node 8 -m nanwatch.netcheck --sizes 8 1MiB 1GiB --rounds 100
  torchrun --nproc_per_node 2 -m nanwatch.netcheck --backend gloo --json > network.json
"""


def main(arguments: Sequence[str]) -> int:
    """Run the check and return the exit status. A rank that fails or hangs ends the process itself, with status 1."""
    options = _parser().parse_args(arguments)
    try:
        member = Member.of(os.environ)
    except NoRankError as error:
        sys.stderr.write(visible(f"nanwatch netcheck: {error}") + "\n")
        return 2
    return _Check(member, options).run()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="nanwatch netcheck",
        description="Check that the ranks of a job can talk to each other: the store, a TCP connection to each"
        " neighbour, and through the backend a barrier, an all-reduce, point-to-point messages.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    seconds = _up_to(86400, float, "seconds should be from 1 to 86400")
    add("--timeout", type=seconds, default=30.0, metavar="SECONDS", help="for each step (default: 30)")
    add("--backend", choices=steps.BACKENDS, help="default: nccl where torch sees a GPU, gloo otherwise")
    memory = "taken on each device (default: 64MiB)"
    add("--memory", type=_size, default=64 << 20, metavar="SIZE", help=memory)
    sizes = "of the all-reduces that are timed (default: 8 64KiB 1MiB 16MiB); none leaves them out"
    usual = [8, 64 << 10, 1 << 20, 16 << 20]
    add("--sizes", type=_size, nargs="*", default=usual, metavar="SIZE", help=sizes)
    rounds = "how often to check, for a fault that comes and goes"
    count = _up_to(10**9, int, "a number from 1 on was expected")
    add("--rounds", type=count, default=1, metavar="N", help=rounds)
    pairs = f"connect every pair of ranks; by default so up to {steps.ALL_PAIRS} ranks, and beyond at the distances"
    add("--all-pairs", action="store_true", help=f"{pairs} 1, 2, 4, ...")
    document = "rank 0 prints one JSON document on stdout, all else goes to stderr"
    add("--json", action="store_true", help=document)
    return parser


def _size(given: str) -> int:
    found = re.fullmatch(r"(\d{1,15})\s*([kmg]?)(?:i?b)?", given.strip().lower())
    if not found or not (size := int(found[1]) * _UNITS[found[2]]):
        raise argparse.ArgumentTypeError(
            f"a size is a number of bytes such as 8, 64KiB or 1GiB, got {given!r}"
        )
    return size


def _up_to(most: float, read: Callable[[str], float], words: str) -> Callable[[str], float]:
    """Return an argparse type for the numbers from 1 to `most`."""

    def checked(given: str) -> float:
        with contextlib.suppress(ValueError):
            if 1 <= (number := read(given)) <= most:
                return number
        raise argparse.ArgumentTypeError(f"{words}, got {given!r}")

    return checked


class _Check:
    """One rank's check."""

    def __init__(self, member: Member, options: argparse.Namespace) -> None:
        self._member = member
        self._options = options
        self._backend = options.backend or "gloo"
        self._lines_to = _STDERR if options.json else _STDOUT
        self._meeting = Meeting(member)
        self._transfers: list[Transfer] = []
        self._peers: list[Arrival] = []
        self._has_printed = False
        self._guard = Guard(options.timeout, self._end_badly)

    def run(self) -> int:
        """Run all steps. Return 0 when all ranks are well. Does not return when this rank is not, or another one."""
        guard, meeting, member, options = self._guard, self._meeting, self._member, self._options
        world_size = member.world_size
        if not member.hosts_store:
            with guard.step("master"):
                reach(member, lambda: guard.remaining)
        with guard.step("store"):
            meeting.open(guard.remaining)
            meeting.listen(guard.hear)
        with guard.step("backend"):
            self._backend = steps.choose_backend(options.backend)
        with guard.step("device"):
            device = steps.choose_device(self._backend, member.local_rank)
            steps.allocate(device, options.memory)
        with guard.step("arrival"):
            token = secrets.token_hex(8)
            listener = Listener(token)
            address = reach(member, lambda: guard.remaining)
            mine = Arrival(
                rank=member.rank,
                world_size=world_size,
                host=member.host,
                local_rank=member.local_rank,
                # An address of this machine alone is of no use to the others.
                address="" if address.startswith("127.") or address == "::1" else address,
                port=listener.port,
                token=token,
                backend=self._backend,
                device=steps.device_name(device),
                versions=steps.versions(self._backend),
            )
            meeting.arrive(mine)
            self._await_arrivals()
        if member.rank == 0:
            say(_header_lines(meeting.arrivals(), self._backend, options.timeout), self._lines_to)
        shifts = steps.shifts(world_size, all_pairs=options.all_pairs or world_size <= steps.ALL_PAIRS)
        with guard.step("links"):
            peers = [meeting.arrival((member.rank + shift) % world_size) for shift in shifts]
            steps.connect(peers, member.master_addr, min(steps.PATIENCE, guard.remaining / 2))
            self._peers = peers
            meeting.count("linked")
            if not self._await(lambda: meeting.have_all("linked")):
                raise StepError("a rank has not yet reached its neighbours")
        # A little less than the clock: the error of the backend tells more than "no answer".
        patience = max(1.0, options.timeout - 1)
        with guard.step("process group"):
            steps.begin(meeting, self._backend, device, patience)
        for number in range(options.rounds):
            suffix = f", round {number + 1} of {options.rounds}" if options.rounds > 1 else ""
            with guard.step(f"barrier{suffix}"):
                steps.barrier(device, patience)
            with guard.step(f"all-reduce{suffix}"):
                steps.all_reduce(device)
            with guard.step(f"point-to-point{suffix}"):
                steps.point_to_point(device, shifts, guard.tick)
        with guard.step("bandwidth"):
            self._transfers = steps.transfers(device, options.sizes, guard.tick)
        self._has_printed = True
        say([f"[{member.name}] is OK (global rank: {member.rank}/{world_size})"], self._lines_to)
        with guard.step("the other ranks"):
            meeting.end(None)
            if not self._await(lambda: meeting.have_all("ended")) or meeting.first() is not None:
                raise StepError("another rank is broken")
            dist.destroy_process_group()
        if member.rank == 0:
            outcomes = meeting.outcomes()
            table = steps.transfer_lines(self._transfers, world_size) if world_size > 1 else []
            say([*table, summary_line(outcomes, world_size)], self._lines_to)
            self._print_document(outcomes)
        meeting.leave(GRACE)
        listener.close()
        guard.stop()
        return 0

    def _await_arrivals(self) -> None:
        meeting, world_size = self._meeting, self._member.world_size
        if not self._await(lambda: meeting.have_all("arrived")):
            missing = meeting.missing()
            came = world_size - len(missing)
            raise StepError(f"{came} of {world_size} ranks came; missing: {spell_runs(missing)}")
        first = meeting.arrival(0)
        if first.world_size != world_size:
            raise StepError(
                f"this rank was told that there are {world_size} ranks, rank 0 that {first.world_size}"
            )
        if first.backend != self._backend:
            raise StepError(
                f"this rank would use {self._backend} and rank 0 {first.backend}: only one of them sees a GPU"
                " (--backend gloo does without)"
            )

    def _await(self, happened: Callable[[], bool]) -> bool:
        """Ask the store ever less often until it has happened. Return False when the step's time is nearly over."""
        pause = 0.02
        while not happened():
            if self._guard.remaining < 0.5:
                return False
            time.sleep(pause)
            pause = min(2 * pause, self._meeting.interval)
        return True

    # The guard calls the methods below in the thread that saw the trouble. The process ends when they return.

    def _end_badly(self, trouble: Trouble) -> None:
        if not self._has_printed:
            self._has_printed = True
            if not trouble.follows:
                trouble = self._look_around(trouble)
            say(_broken_lines(self._member, trouble, self._backend), self._lines_to)
        # The store may hang as anything else here, so it gets a thread and its time.
        patience = 2 * self._meeting.interval + GRACE + 1
        rest = threading.Thread(target=self._tell_others, args=(trouble, patience), daemon=True)
        rest.start()
        rest.join(patience + 1)

    def _look_around(self, trouble: Trouble) -> Trouble:
        """Add the neighbours that cannot be reached any more: a backend seldom says which rank it waited for."""
        try:
            steps.connect(self._peers, self._member.master_addr, _LOOK_AROUND)
        except LinkError as error:
            return replace(trouble, why=f"{trouble.why}; {error}")
        return trouble

    def _tell_others(self, trouble: Trouble, patience: float) -> None:
        """Report the end and stay until all have ended: torchrun ends the ranks of a node as soon as one has gone."""
        meeting, rank = self._meeting, self._member.rank
        is_first = False
        outcomes: dict[int, Trouble | None] = {rank: trouble}
        with suppressing("the store was gone when the end was to be told"):
            is_first = meeting.end(trouble)
            until = time.monotonic() + patience
            while not meeting.have_all("ended") and time.monotonic() < until:
                time.sleep(0.05)
            if is_first or rank == 0:
                outcomes = meeting.outcomes()
        if is_first:
            say([summary_line(outcomes, self._member.world_size)], self._lines_to)
        self._print_document(outcomes)
        meeting.leave(GRACE)

    def _print_document(self, outcomes: Mapping[int, Trouble | None]) -> None:
        """Print the JSON document, where one was asked for and this is rank 0."""
        member, meeting = self._member, self._meeting
        if member.rank or not self._options.json:
            return
        arrivals: list[Arrival] = []
        first = None
        with suppressing("the store was gone when arrivals were to be read"):
            arrivals, first = meeting.arrivals(), meeting.first()
        known = {one.rank: one for one in arrivals}
        document = {
            "ok": len(outcomes) == member.world_size and not any(outcomes.values()),
            "world_size": member.world_size,
            "backend": self._backend,
            "timeout_s": self._options.timeout,
            "versions": sorted({one.versions for one in arrivals}),
            "first_failure": first,
            "ranks": [_rank_entry(rank, known.get(rank), outcomes) for rank in range(member.world_size)],
            "all_reduce": [one.entry(member.world_size) for one in self._transfers],
        }
        say(json.dumps(document, indent=2).splitlines(), _STDOUT)


def _rank_entry(rank: int, arrival: Arrival | None, outcomes: Mapping[int, Trouble | None]) -> dict[str, Any]:
    trouble = outcomes.get(rank)
    return {
        "rank": rank,
        **{name: getattr(arrival, name, None) for name in ("host", "local_rank", "device")},
        "verdict": "broken" if trouble is not None else "OK" if rank in outcomes else "silent",
        **{name: getattr(trouble, name, None) for name in ("step", "why")},
    }


# The lines.


def _broken_lines(member: Member, trouble: Trouble, backend: str) -> list[str]:
    """Return the rank, the step, why, and what to try."""
    return [
        f"[{member.name}] is broken (global rank: {member.rank}/{member.world_size})",
        f"    step: {trouble.step}",
        f"    why:  {trouble.why}",
        f"    try:  {steps.advice(trouble, member, backend)}",
    ]


def _header_lines(arrivals: Sequence[Arrival], backend: str, timeout: float) -> list[str]:
    """Return the versions and the device of each rank, ranks of the same host and device in one line."""
    hosts = len({one.host for one in arrivals})
    ranks = "1 rank" if len(arrivals) == 1 else f"{len(arrivals)} ranks"
    lines = [
        f"netcheck: {ranks} on {hosts} {'host' if hosts == 1 else 'hosts'}, {backend}, {timeout:g} s for each step"
    ]
    versions = _grouped((one.versions, one.rank) for one in arrivals)
    if len(versions) == 1:
        lines += [f"    {what}" for what in versions]
    else:
        lines += [f"    {what} (ranks {spell_runs(of)})" for what, of in versions.items()]
        lines.append("    WARNING: not all ranks have the same versions")
    devices = _grouped((f"{one.host}: {one.device}", one.rank) for one in arrivals)
    return lines + [f"    {what} (ranks {spell_runs(of)})" for what, of in devices.items()]


def _grouped(pairs: Iterable[tuple[str, int]]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for what, rank in pairs:
        groups.setdefault(what, []).append(rank)
    return groups


def summary_line(outcomes: Mapping[int, Trouble | None], world_size: int) -> str:
    """Return how many ranks are well, which are not, and which have not reported."""
    troubles = {rank: trouble for rank, trouble in outcomes.items() if trouble is not None}
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
    parts = [f"{what}: {spell_runs(ranks)}" for what, ranks in groups.items() if ranks]
    return "; ".join([f"netcheck: {len(outcomes) - len(troubles)} of {world_size} ranks OK", *parts])


def say(lines: Iterable[str], descriptor: int) -> None:
    """Write the lines in one piece. A pipe keeps pieces of up to 4096 bytes whole among those of other ranks."""
    rest = "".join(f"{visible(line)}\n" for line in lines).encode()
    with contextlib.suppress(OSError):
        while rest:
            rest = rest[os.write(descriptor, rest) :]
