"""A plain TCP connection to each neighbour: what every backend needs to begin with, and tells apart when it fails.

Each rank listens on a port that the system chose, as the backends do, and sends 64 KiB to whoever connects: more than
a packet, so that a path on which only small packets pass is seen.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from .guard import LinkError
from .meeting import Arrival

_BYTES = 65536
# A lost SYN is sent again after 1, 3 and 7 s. A link that is silent for 10 is no link.
PATIENCE = 10.0
ALL_PAIRS = 32  # ranks, up to which every pair is tried


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
    """What others may use of the address from which the master was reached; "" where it is of use here only."""
    return "" if seen.startswith("127.") or seen == "::1" else seen
