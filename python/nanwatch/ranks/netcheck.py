"""Check of a network: can the ranks of a job reach each other, and if not, which rank or pair cannot?"""

from __future__ import annotations

import argparse
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from ..util.job import spell_runs, store_key
from ..util.messages import spell, suppressing, visible

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "MASTER_ADDR")
_SLURM = {"RANK": "SLURM_PROCID", "WORLD_SIZE": "SLURM_NTASKS", "LOCAL_RANK": "SLURM_LOCALID"}
_BYTES = 65536  # more than a packet: some paths lose only large packets
_ALL_PAIRS = 32  # ranks up to which every pair is tried; beyond it the distances 1, 2, 4, …
_GRACE = 2.0  # seconds from the news of another rank's failure to the end: an error of this rank says more


def main(arguments: Sequence[str]) -> NoReturn:
    """Check, and end the process."""
    backend = "nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    status = "exit status: 0 when all ranks are OK, 1 when one is not, 2 when the environment names no rank"
    parser = argparse.ArgumentParser("nanwatch.netcheck", description=__doc__, epilog=status)
    parser.add_argument("--timeout", type=float, default=30.0, help="seconds for each step (default: 30)")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default=backend, help="nccl with a GPU")
    _Check(parser.error, **vars(parser.parse_args(arguments))).run()


class _Check:
    def __init__(self, refuse: Callable[[str], object], backend: str, timeout: float) -> None:
        env = {name: os.environ.get(name) or os.environ.get(_SLURM.get(name, ""), "") for name in _NAMES}
        env["LOCAL_RANK"] = env["LOCAL_RANK"] or "0"  # often not set where each host has one rank
        numbers = [int(env[name]) for name in _NAMES[:4] if env[name].isdecimal()]
        if len(numbers) < 4 or numbers[0] >= numbers[1] or not env["MASTER_ADDR"]:
            words = ", ".join(f"{name}={value[:60]!r}" for name, value in env.items())
            refuse(f"{words} name no rank: use torchrun --nproc_per_node 2 -m nanwatch.netcheck, or srun")
        self._rank, self._count, self._local_rank, port = numbers
        self._name = f"{socket.gethostname()}-{self._local_rank}"
        self._master = env["MASTER_ADDR"], port
        self._hosts_store = self._rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        self._prefix = f"nanwatch/netcheck/{store_key()}"
        self._backend, self._timeout, self._limit = backend, timeout, timedelta(seconds=max(1.0, timeout - 1))
        self._distances = [i for i in range(1, self._count) if self._count <= _ALL_PAIRS or not i & (i - 1)]
        self._store: Any = None
        self._peers: list[tuple[str, str, int]] = []
        self._news, self._is_done, self._ending = "", False, threading.Lock()

    def run(self) -> NoReturn:
        self._begin(f"store at {self._master[0]} port {self._master[1]}")
        threading.Thread(target=self._watch_clock, daemon=True).start()
        try:
            self._store = self._connect(self._hosts_store)
            threading.Thread(target=self._listen, daemon=True).start()
            self._begin("arrival")
            self._exchange_addresses()
            self._begin("links")
            if unreachable := self._unreachable(self._timeout / 2):
                raise RuntimeError(unreachable)
            self._await("linked")
            self._begin("process group")
            self._send()
            self._say("OK")
            self._begin("the other ranks")
            self._await("ended")
            self._is_done = True
            self._await("left", waits=self._hosts_store)
        except Exception as error:
            self._fail(spell(error).removeprefix("RuntimeError: "))
        # The interpreter's shutdown would abort a thread that returns from a call into the store or gloo (SIGABRT).
        os._exit(0)

    def _begin(self, step: str) -> None:
        self._step, self._deadline = step, time.monotonic() + self._timeout

    def _connect(self, is_master: bool) -> Any:
        return PrefixStore(self._prefix, TCPStore(*self._master, None, is_master, self._limit, False))

    def _await(self, what: str, value: str = "yes", *, waits: bool = True) -> None:
        """Report that this rank has `what`, and wait until all ranks have."""
        stored = self._store.compare_set(f"{what}/{self._rank}", "", value).decode()
        if stored != value:
            raise RuntimeError(f"{stored.split()[0]} is rank {self._rank} already: start each rank once")
        self._store.add(what, 1)
        while waits and self._store.add(what, 0) < self._count:
            if time.monotonic() > self._deadline - 0.5:
                missing = [rank for rank in range(self._count) if not self._store.check([f"{what}/{rank}"])]
                raise RuntimeError(f"ranks that have not {what}: {spell_runs(missing)}")
            time.sleep(max(0.05, self._count / 5000))  # at most 5,000 questions per second to one store

    def _exchange_addresses(self) -> None:
        with socket.create_connection(self._master, self._timeout / 2) as connection:
            family, address = connection.family, connection.getsockname()[0]
        address = "" if address.startswith(("127.", "::1")) else address  # this host's alone
        server = socket.create_server(("", 0), family=family, backlog=128)
        threading.Thread(target=_serve, args=(server,), daemon=True).start()
        self._await("arrived", f"{self._name} {server.getsockname()[1]} {address}")
        for peer in [(self._rank + distance) % self._count for distance in self._distances]:
            name, port, address = self._store.get(f"arrived/{peer}").decode().split(" ")
            self._peers.append((f"rank {peer} ({name})", address or self._master[0], int(port)))

    def _unreachable(self, patience: float) -> str:
        """Return the peers that cannot be reached over TCP, with the reasons, or ""."""
        with ThreadPoolExecutor(_ALL_PAIRS) as pool:
            return "; ".join(filter(None, pool.map(lambda peer: _attempt(peer, patience), self._peers)))

    def _send(self) -> None:
        """Send a sum and messages through the backend, and compare every element."""
        rank, count, device = self._rank, self._count, None
        if self._backend == "nccl":
            device = torch.device("cuda", self._local_rank)
            torch.cuda.set_device(device)
        # An error of gloo says more than the clock. NCCL at its limit ends the process without a word.
        limit = self._limit if device is None else self._limit + timedelta(minutes=2)
        dist.init_process_group(self._backend, None, limit, count, rank, self._store, device_id=device)
        numbers = torch.arange(1 << 18, device=device) % 1009
        self._begin("all-reduce")
        total = numbers * (rank + 1)
        dist.all_reduce(total)
        if not torch.equal(total, numbers * (count * (count + 1) // 2)):
            raise RuntimeError("the sum over all ranks is wrong")
        for distance in self._distances:
            to, origin = (rank + distance) % count, (rank - distance) % count
            self._begin(f"sending to rank {to}, receiving from rank {origin}")
            pair = [dist.P2POp(dist.isend, numbers, to), dist.P2POp(dist.irecv, total, origin)]
            for work in dist.batch_isend_irecv(pair):
                work.wait()

    def _watch_clock(self) -> None:
        while time.monotonic() < self._deadline:
            time.sleep(0.1)
        self._fail(f"no answer within {self._timeout:g} s")

    def _listen(self) -> None:
        """Wait until a rank has failed or the store has gone, and end this rank a little later."""
        try:
            store = self._connect(False)  # a connection of its own: a question on the other one may hang
            while not store.check(["first"]):
                time.sleep(max(0.5, self._count / 5000))
            self._news = store.get("first").decode()
        except RuntimeError:  # torch's errors of a connection
            self._news = f"the store at {self._master} has gone, and with it the process that held it"
        time.sleep(_GRACE)
        if not self._is_done:
            self._fail("")

    def _say(self, verdict: str, *reasons: str) -> None:
        """Write lines in one piece, which a pipe does not mix with those of other ranks."""
        lines = [f"[{self._name}] is {verdict} (global rank: {self._rank}/{self._count})", *reasons]
        with suppressing("stdout is closed"):
            os.write(1, "".join(f"{visible(line)}\n" for line in lines).encode())

    def _fail(self, why: str) -> NoReturn:
        """Print why this rank is broken, tell the others, and end the process."""
        self._ending.acquire()  # the thread that comes first ends the process
        # A backend seldom says which rank it waited for.
        whys = why, "" if self._step == "links" else self._unreachable(1.5), self._news
        self._say("broken", f"    step: {self._step}", f"    why:  {'; '.join(filter(None, whys))}")
        first = f"rank {self._rank} ({self._name}) failed first, in the step {self._step}"
        # The store may hang too. torchrun ends all ranks of a node when one has ended, so this one stays a little.
        if self._store:
            threading.Thread(target=self._store.compare_set, args=("first", "", first), daemon=True).start()
        time.sleep(2 * _GRACE)
        os._exit(1)


def _serve(server: socket.socket) -> None:
    """Answer each connection. The bytes fit into the kernel's buffer, so that no peer keeps others waiting."""
    server.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * _BYTES)
    while True:
        with server.accept()[0] as connection, suppressing("a peer had gone when it was to be answered"):
            connection.sendall(bytes(_BYTES))


def _attempt(peer: tuple[str, str, int], patience: float) -> str:
    """Return why the peer cannot be reached; "" when it can."""
    (name, address, port), received = peer, 0
    try:
        with socket.create_connection((address, port), patience) as connection:
            while part := connection.recv(_BYTES):
                received += len(part)
        error = "" if received == _BYTES else "connection closed"
    except OSError as failure:
        error = failure.strerror or str(failure)
    return error and f"{name} at {address} port {port}: {error}, {received} of {_BYTES} bytes came"
