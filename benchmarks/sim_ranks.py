"""Cost of a consensus of many ranks: real OriginConsensus objects with their own connections to one real TCPStore.

Each writer is a thread with a TCPStore client, which its OriginConsensus clones, as in a job. The store is in a process
of its own, and a proxy before it counts bytes. Messages are what the consensus objects ask of the store, counted by
what they call. The pauses between looks are those of a real job, so a run takes minutes; its times are no measure of
anything.

    TORCH_CPP_LOG_LEVEL=ERROR python benchmarks/sim_ranks.py     # 1,000 writers, two scenarios
    python benchmarks/sim_ranks.py --writers 8 256 1000 --json benchmarks/results/sim-ranks.json

With `--events` nothing is started: the ranks and their store are simulated by events (`_rank_events.py`), with lost and
slow ranks and a restart, for the agreement on the first failure and for the comparison of replicas.

    python benchmarks/sim_ranks.py --events 16384                # a minute
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from _rank_events import events_table, play_all

from nanwatch import Finding
from nanwatch.distributed import consensus
from nanwatch.distributed.consensus import OriginConsensus
from nanwatch.report.finding import Origin

PATIENCE = 240.0  # seconds: two busy cores need a good part of it for 1,000 writers
FILES_EACH = 8  # descriptors a writer needs in the process of store and proxy: six, and room


@dataclass
class Traffic:
    """Traffic through the proxy: connections, bytes to the store and back."""

    connections: int = 0
    sent: int = 0
    received: int = 0


class Counting:
    """A store that counts what it is asked, by name."""

    def __init__(self, store: Any, counts: Counter[str]) -> None:
        self._store, self._counts = store, counts

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._store, name)

        def call(*arguments: Any) -> Any:
            self._counts[name] += 1
            return method(*arguments)

        return call


@dataclass
class Writer:
    """One rank: what it finds, if anything, and what it asked and was told."""

    rank: int
    finding: Finding | None
    sequence: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    origin: Origin | None = None
    error: str = ""


@dataclass
class Outcome:
    """A scenario that was played."""

    scenario: str
    writers: int
    right: int  # writers that named the true origin with exact counts
    errors: list[str]
    messages: int  # of all writers, to the store
    messages_least: int  # of one writer
    messages_most: int
    by_call: dict[str, int]
    connections: int
    bytes_sent: int
    bytes_received: int
    keys: int


def serve(pipe: Any, most_files: int) -> None:
    """The process of the store and the proxy: gives its port, then its counts whenever it is asked."""
    raise_limit(most_files)
    # A socket of IPv4: the store looks up the name of everyone who connects, 127.0.0.1 has one in /etc/hosts, and
    # ::ffff:127.0.0.1 has not. Where the name server is slow to answer, the store answers nobody meanwhile.
    listening = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listening.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    seen = Traffic()

    async def relay(reader: Any, writer: Any, is_to_store: bool) -> None:
        try:
            while data := await reader.read(65536):
                if is_to_store:
                    seen.sent += len(data)
                else:
                    seen.received += len(data)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass  # a client that has ended
        finally:
            writer.close()

    async def connected(reader: Any, writer: Any) -> None:
        seen.connections += 1
        to_store = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(relay(reader, to_store[1], True), relay(to_store[0], writer, False))

    async def main() -> None:
        server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=4096)
        pipe.send(server.sockets[0].getsockname()[1])
        loop = asyncio.get_running_loop()
        while await loop.run_in_executor(None, pipe.recv):
            pipe.send((asdict(seen), store.num_keys()))

    asyncio.run(main())


@contextmanager
def served(most_files: int) -> Iterator[tuple[int, Callable[[], tuple[Traffic, int]]]]:
    """The store and the proxy in a process of their own: the proxy's port, and what gives its traffic and the keys."""
    here, there = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=serve, args=(there, most_files), daemon=True
    )
    process.start()
    there.close()  # so that its end is heard of

    def counts() -> tuple[Traffic, int]:
        here.send(True)
        traffic, keys = here.recv()
        return Traffic(**traffic), keys

    try:
        yield here.recv(), counts
    finally:
        process.terminate()
        process.join(30)


def raise_limit(files: int) -> None:
    """Let this process have so many open files. Raises SystemExit where the system forbids it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < files:
        if hard != resource.RLIM_INFINITY and hard < files:
            raise SystemExit(
                f"{files} open files are needed and {hard} are allowed; raise the hard limit (ulimit -Hn) or ask for"
                f" fewer --writers: {hard // FILES_EACH - 16}"
            )
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))


def made_up(rank: int, kind: Any, batch: int) -> Finding:
    """A finding as long as one of a real model."""
    return Finding(
        "model.layers.17.mlp.down_proj", "Linear", "output", batch, rank, "nan", kind, None, 1, 8, (0,)
    )


def all_fail(number: int) -> tuple[list[Writer], int, int]:
    """Every rank finds the same at once, as after an all-reduce, but for one that found it a frame earlier."""
    first = number * 2 // 3
    writers = [
        Writer(rank, made_up(rank, "produced", 812), 90 if rank == first else 91) for rank in range(number)
    ]
    return writers, first, number


def one_fails(number: int) -> tuple[list[Writer], int, int]:
    """One rank has a finding, all others settle."""
    first = number // 2
    writers = [
        Writer(rank, made_up(rank, "produced", 812) if rank == first else None, 90) for rank in range(number)
    ]
    return writers, first, 1


SCENARIOS = {"all fail at once": all_fail, "one fails, the others settle": one_fails}


def play(name: str, number: int, patience: float = PATIENCE) -> Outcome:
    """All writers of a scenario, from their connection to their verdict."""
    writers, true_rank, num_failed = SCENARIOS[name](number)
    ready = threading.Barrier(number)
    counting: dict[int, Counter[str]] = {}
    make_store = consensus._own_store
    consensus._own_store = lambda store, prefix: Counting(make_store(store, prefix), counting[id(store)])

    def live(writer: Writer, port: int) -> None:
        try:
            store = dist.TCPStore(
                "127.0.0.1", port, None, False, timedelta(seconds=patience), wait_for_workers=False
            )
            counting[id(store)] = writer.calls
            one = OriginConsensus(store, writer.rank, number, peer_timeout=patience)
        except Exception as error:
            writer.error = f"rank {writer.rank}: {error}"
            ready.abort()
            return
        try:
            ready.wait(patience)
            if writer.finding is not None:
                one.publish(writer.finding, writer.sequence)
            else:
                until = time.monotonic() + patience
                while not one.pending() and time.monotonic() < until:
                    time.sleep(0.25)
            writer.origin = one.settle(writer.finding)
        except Exception as error:
            writer.error = f"rank {writer.rank}: {error}"
        finally:
            one.stop()

    try:
        with served(FILES_EACH * number + 256) as (port, counts):
            threads = [threading.Thread(target=live, args=(writer, port), daemon=True) for writer in writers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(patience)
            traffic, keys = counts()
    finally:
        consensus._own_store = make_store
    each = [sum(writer.calls.values()) for writer in writers]
    by_call: Counter[str] = sum((writer.calls for writer in writers), Counter())
    errors = [writer.error for writer in writers if writer.error]
    return Outcome(
        scenario=name,
        writers=number,
        right=sum(_is_right(writer.origin, true_rank, num_failed, number) for writer in writers),
        errors=errors,
        messages=sum(each),
        messages_least=min(each),
        messages_most=max(each),
        by_call=dict(by_call),
        connections=traffic.connections,
        bytes_sent=traffic.sent,
        bytes_received=traffic.received,
        keys=keys,
    )


def _is_right(origin: Origin | None, rank: int, num_failed: int, number: int) -> bool:
    return (
        origin is not None
        and (origin.rank, origin.num_alike, origin.num_failed, origin.num_reported)
        == (rank, 1, num_failed, number)
        and origin.is_complete
    )


def table(outcomes: list[Outcome]) -> str:
    """A row a scenario."""
    heads = [
        "scenario",
        "writers",
        "right",
        "messages",
        "a writer",
        "kB to",
        "kB back",
        "connections",
        "keys",
    ]
    rows: list[list[str]] = [heads]
    for one in outcomes:
        rows.append(
            [
                one.scenario,
                str(one.writers),
                str(one.right),
                str(one.messages),
                f"{one.messages_least} to {one.messages_most}",
                f"{one.bytes_sent / 1000:.0f}",
                f"{one.bytes_received / 1000:.0f}",
                str(one.connections),
                str(one.keys),
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )


def main(arguments: list[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Status 0 when every writer was right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--writers", type=int, nargs="+", default=[1000])
    parser.add_argument("--events", type=int, metavar="RANKS", help="simulate so many ranks, and start none")
    parser.add_argument("--only", choices=SCENARIOS, action="append")
    parser.add_argument("--json", type=Path, help="write what was counted to this file")
    options = parser.parse_args(arguments)
    if options.events is not None:
        played = play_all(options.events)
        say(events_table(played))
        return 0 if all(one.right == one.told for one in played) else 1
    raise_limit(FILES_EACH * max(options.writers) + 256)
    threading.stack_size(512 * 1024)  # 2,000 threads
    outcomes = [play(name, number) for number in options.writers for name in options.only or SCENARIOS]
    say(table(outcomes))
    for one in outcomes:
        for error in one.errors[:5]:
            say(f"{one.scenario}: {error}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=2) + "\n")
    return 0 if all(one.right == one.writers and not one.errors for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
