"""Cost of one rank's part in a consensus, step by step: messages and bytes, at a proxy before a real TCPStore.

A real OriginConsensus takes each step. The other ranks are no processes: their keys are in the store before it comes,
so that it never waits, and a question that it would ask again and again while it waits is counted by itself. A message
is a call of the store; a byte is one of payload, without TCP's own. All keys have torchrun's run id in them, here 36
characters.

    python benchmarks/count_verdict.py
    python benchmarks/count_verdict.py --ranks 8 256 16384 --json benchmarks/results/verdict-traffic.json
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from sim_ranks import Counting, made_up, served

from nanwatch.distributed import consensus
from nanwatch.distributed.consensus import OriginConsensus, StoreProtocol
from nanwatch.report.finding import RankObservation

REPEATS = 100  # of a single question
NEVER = 3600.0  # seconds between two looks, so that none comes in between
RUN_ID = "6d4e1c9a-0b57-4c1e-9f35-2a8b7e60d1f4"  # as torchrun --standalone makes them
LOOKS, FAILS, SETTLES_TOO, SETTLES = (
    "looks while all is well",
    "fails",
    "settles then",
    "settles without having failed",
)


@dataclass
class Step:
    """Work of one of so many ranks: calls of the store by name, bytes to the store and back."""

    ranks: int
    what: str
    messages: int
    by_call: dict[str, int]
    sent: float
    received: float


def count(number: int) -> list[Step]:
    """The steps of one rank of `number`, which is not the last to come."""
    steps: list[Step] = []
    calls: Counter[str] = Counter()
    make_store, interval = consensus._own_store, consensus._INTERVAL
    consensus._own_store = lambda store, prefix: Counting(make_store(store, prefix), calls)
    consensus._INTERVAL = NEVER
    with served(256) as (port, counts):

        def step(what: str, do: Callable[[], object], repeats: int = 1) -> None:
            calls.clear()
            before, _ = counts()
            for _ in range(repeats):
                do()
            after, _ = counts()
            by_call = {name: times // repeats for name, times in sorted(calls.items())}
            sent, received = (
                (after.sent - before.sent) / repeats,
                (after.received - before.received) / repeats,
            )
            steps.append(Step(number, what, sum(by_call.values()), by_call, sent, received))

        def begin(name: str) -> OriginConsensus:
            one = OriginConsensus(store, number - 1, number, 600.0, name=name)
            one._in_thread(lambda until: None)  # it has connected
            return one

        def others_come(one: OriginConsensus) -> None:
            # One rank less than all: the last one that reports sets a key more.
            board = StoreProtocol(dist.PrefixStore(one._prefix, store), number - 2)
            board.publish(RankObservation.of(made_up(0, "produced", 812), 0, 90, None, ""))
            for _ in range(number - 2):
                board.report()
            for _ in range(number - 1):
                board.leave()

        def ask(one: OriginConsensus, question: Callable[[StoreProtocol], object]) -> Callable[[], object]:
            return lambda: one._in_thread(lambda until: question(one._protocol))

        store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
        mine = made_up(number - 1, "produced", 812)
        began: list[OriginConsensus] = []
        try:
            one = begin("0")
            began.append(one)
            step(LOOKS, ask(one, StoreProtocol.has_news), REPEATS)
            others_come(one)
            step(FAILS, lambda: one.publish(mine, 91))
            step(SETTLES_TOO, lambda: one.settle(mine))
            step("waits for the others' say, a question", ask(one, StoreProtocol.is_complete), REPEATS)
            step("waits for their farewell, a question", ask(one, StoreProtocol.all_left), REPEATS)
            two = begin("1")
            began.append(two)
            others_come(two)
            step(SETTLES, two.settle)
        finally:
            for each in began:
                each.stop()
            consensus._own_store, consensus._INTERVAL = make_store, interval
    return steps


def table(steps: list[Step]) -> str:
    """A row a step."""
    rows = [("ranks", "a rank that", "messages", "B to", "B back", "calls")]
    for one in steps:
        by_call = ", ".join(f"{times} {name}" for name, times in one.by_call.items())
        rows.append(
            (str(one.ranks), one.what, str(one.messages), f"{one.sent:.0f}", f"{one.received:.0f}", by_call)
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i in (1, 5) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def jobs(steps: list[Step]) -> str:
    """The steps multiplied to whole jobs, none of which was run; without what they ask while they wait."""
    lines = []
    for number in sorted({one.ranks for one in steps}):
        of = {one.what: one for one in steps if one.ranks == number}
        looks, fails, settles_too, settles = (of[what] for what in (LOOKS, FAILS, SETTLES_TOO, SETTLES))
        each_second = number * (looks.sent + looks.received)
        for what, failed in (("all fail at once", number), ("one fails", 1)):
            parts = [(failed, fails), (failed, settles_too), (number - failed, settles)]
            messages = sum(times * one.messages for times, one in parts)
            size = sum(times * (one.sent + one.received) for times, one in parts)
            lines.append(
                f"{number} ranks, {what}: {messages:,} messages, {size / 1000:,.0f} kB both ways;"
                f" {each_second / 1000:,.1f} kB a second while all is well"
            )
    return "\n".join(lines)


def main(arguments: list[str] | None = None, say: Callable[[str], None] = print) -> int:
    """Status 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 256, 16_384], help="at least 3")
    parser.add_argument("--json", type=Path, help="write what was counted to this file")
    options = parser.parse_args(arguments)
    with mock.patch.dict(os.environ, TORCHELASTIC_RUN_ID=RUN_ID):
        steps = [one for number in options.ranks for one in count(number)]
    say(f"{table(steps)}\n\n{jobs(steps)}")
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(one) for one in steps], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
