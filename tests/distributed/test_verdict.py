"""The verdict of several ranks, one of which is a process that is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch.distributed as dist

from nanwatch.ranks.consensus import OriginConsensus
from nanwatch.report.finding import Origin
from support.processes import environment
from support.sightings import connect, finding, serve

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without torch.distributed")


@pytest.fixture
def server() -> Any:
    """A store of its own."""
    return serve()


_DYING = """
import os, signal, sys, time
import torch.distributed as dist
from nanwatch.ranks.consensus import OriginConsensus
from support.sightings import finding
store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), None, False, wait_for_workers=False)
assert OriginConsensus(store, 1, 3).publish(finding("produced", 4, rank=1), 17)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_once_it_has_told_is_still_the_origin(server):
    """The others learn of it from the store, and do not wait for it, as it has had its say."""
    dying = subprocess.run([sys.executable, "-c", _DYING, str(server.port)], env=environment(), timeout=120)
    assert dying.returncode == -signal.SIGKILL
    verdicts = [OriginConsensus(connect(server), rank, 3) for rank in (0, 2)]
    assert verdicts[0].publish(finding("weight", 5, label="weight"), 0)
    until = time.monotonic() + 20
    while not verdicts[1].pending() and time.monotonic() < until:
        time.sleep(0.02)
    settled: list[Origin] = []
    threads = [threading.Thread(target=lambda one=one: settled.append(one.settle())) for one in verdicts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    for one in verdicts:
        one.stop()
    assert [(origin.rank, origin.first.sequence, origin.is_complete) for origin in settled] == [
        (1, 17, True)
    ] * 2
