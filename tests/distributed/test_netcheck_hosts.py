"""netcheck between hosts whose network is spoilt: three network namespaces with a router between them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from support.netcheck_ranks import HOST, MARGIN, Ranks, step, why

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch was built without gloo")


def _run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


@pytest.fixture
def three_hosts() -> Iterator[tuple[str, list[str]]]:
    """The namespace of a router, and of three hosts behind it: 10.77.N.2."""
    if shutil.which("ip") is None:
        pytest.skip("no iproute2 (the command ip) for network namespaces")
    mark = f"nwt{os.getpid()}"
    router, hosts = f"{mark}r", [f"{mark}h{number}" for number in range(3)]
    try:
        try:
            for name in (router, *hosts):
                _run("ip", "netns", "add", name)
            _run("ip", "netns", "exec", router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
            for number, host in enumerate(hosts):
                link = f"v{number}"
                _run(
                    "ip",
                    "link",
                    "add",
                    link,
                    "netns",
                    router,
                    "type",
                    "veth",
                    "peer",
                    "name",
                    "eth0",
                    "netns",
                    host,
                )
                _run("ip", "-n", router, "addr", "add", f"10.77.{number}.1/24", "dev", link)
                _run("ip", "-n", router, "link", "set", link, "up")
                _run("ip", "-n", host, "addr", "add", f"10.77.{number}.2/24", "dev", "eth0")
                for interface in ("eth0", "lo"):
                    _run("ip", "-n", host, "link", "set", interface, "up")
                _run("ip", "-n", host, "route", "add", "10.77.0.0/16", "via", f"10.77.{number}.1")
        except (subprocess.CalledProcessError, OSError) as error:
            pytest.skip(f"no network namespaces here: {getattr(error, 'stderr', '') or error}")
        yield router, hosts
    finally:
        for name in (router, *hosts):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start_on(ranks: Ranks, hosts: list[str], *arguments: str) -> None:
    for rank, host in enumerate(hosts):
        ranks.start(
            rank,
            3,
            *arguments,
            before=("ip", "netns", "exec", host),
            MASTER_ADDR="10.77.0.2",
            GLOO_SOCKET_IFNAME="eth0",
            LOCAL_RANK="0",
        )


@pytest.mark.slow
def test_two_hosts_that_cannot_reach_each_other_are_named(ranks, three_hosts):
    """Both reach rank 0, and what they send each other is lost: ranks 1 and 2 are named, and rank 0 is not blamed."""
    router, hosts = three_hosts
    _run("ip", "-n", router, "rule", "add", "from", "10.77.1.2", "to", "10.77.2.2", "blackhole")
    start_on(ranks, hosts, "--timeout", "16")
    ends = [ranks.end_of(rank, 16 + MARGIN) for rank in range(3)]
    assert [status for status, _ in ends] == [1, 1, 1]
    for rank, other in ((1, 2), (2, 1)):
        assert step(ends[rank][1]) == "links"
        assert f"rank {other} ({HOST}-0) at 10.77.{other}.2" in why(ends[rank][1])
        assert "lost" in why(ends[rank][1])
    assert re.fullmatch(r"rank [12] failed first, in the step links", why(ends[0][1]))
    assert "broken: 1-2; stopped by that: 0" in "".join(out for _, out in ends)


@pytest.mark.slow
def test_a_link_that_breaks_later_is_named(ranks, three_hosts):
    """The backend only says that time is over; a look around says which rank cannot be reached any more."""
    router, hosts = three_hosts
    start_on(ranks, hosts, "--timeout", "10", "--rounds", "100000")
    output = ranks.started[0].stdout
    assert output is not None
    assert output.readline().startswith("netcheck: 3 ranks")
    time.sleep(4)
    _run("ip", "-n", router, "rule", "add", "from", "10.77.1.2", "to", "10.77.2.2", "blackhole")
    ends = [ranks.end_of(rank, 10 + MARGIN) for rank in range(3)]
    assert [status for status, _ in ends] == [1, 1, 1]
    said = [
        out for _, out in ends if re.search(r"rank [12] \(\S+\) at 10\.77\.[12]\.2 port \d+: no answer", out)
    ]
    assert said
    assert not any("10.77.0.2 port" in why(out) for _, out in ends)


@pytest.mark.slow
def test_a_path_that_loses_large_packets_is_named(ranks, three_hosts):
    """A connection opens over it and what is then sent never comes: the line says to compare the MTU."""
    router, hosts = three_hosts
    _run("ip", "-n", router, "link", "set", "v2", "mtu", "1000")
    _run("ip", "-n", router, "rule", "add", "ipproto", "icmp", "blackhole")
    start_on(ranks, hosts, "--timeout", "16")
    ends = [ranks.end_of(rank, 16 + MARGIN) for rank in range(3)]
    assert [status for status, _ in ends] == [1, 1, 1]
    assert "MTU" in why(ends[2][1])
