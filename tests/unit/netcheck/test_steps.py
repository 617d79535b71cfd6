"""The steps of netcheck, each by itself: links, devices, sums, rates, and the advice after a failure."""

from __future__ import annotations

import contextlib
import re
import socket
import threading
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from nanwatch.netcheck import steps
from nanwatch.netcheck.meeting import LinkError, Member, StepError, Trouble
from support.netcheck_ranks import arrival, free_port


def test_a_listener_that_is_the_right_one_is_reached():
    """Also where its address is only good on its own host, by the master's."""
    listener = steps.Listener("secret")
    try:
        steps.connect(
            [arrival(1, listener.port, "secret"), arrival(2, listener.port, "secret", "")], "localhost", 5.0
        )
    finally:
        listener.close()


def test_failures_of_links_are_told_apart():
    """Another program, a refusal and a silent peer each have their words, and each peer its name."""
    listener, silent = steps.Listener("secret"), socket.create_server(("127.0.0.1", 0))
    peers = [
        arrival(1, listener.port, "another"),
        arrival(2, free_port(), "secret"),
        arrival(3, silent.getsockname()[1], "secret"),
    ]
    with silent, pytest.raises(StepError) as raised:
        steps.connect(peers, "localhost", 1.0)
    listener.close()
    first, second, third = re.split(r"; (?=rank \d)", str(raised.value))
    assert first.startswith("rank 1 (node-1)")
    assert "another program answers there" in first
    assert second.startswith("rank 2 (node-2)")
    assert "refused" in second
    assert third.startswith("rank 3 (node-3)")
    assert "connected, but 0 of 65536 bytes came" in third


@contextlib.contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """The port of a server that sends this to one who connects, and then closes."""

    def serve() -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield server.getsockname()[1]
        thread.join()


def test_a_link_that_breaks_off_is_told_with_what_came():
    """A peer that sends its token and a little more and ends, and one that ends at once."""
    for answer in (b"secret" + b"." * 994, b""):
        with answering(answer) as port, pytest.raises(LinkError) as error:
            steps.connect([arrival(1, port, "secret")], "localhost", 5.0)
        assert str(error.value).endswith(f"closed the connection after {len(answer)} of 65536 bytes")


def test_of_many_broken_links_four_are_named():
    """And the number of the others."""
    peers = [arrival(rank, free_port(), "secret") for rank in range(7)]
    with pytest.raises(LinkError) as error:
        steps.connect(peers, "localhost", 1.0)
    assert [f"rank {rank} " in str(error.value) for rank in range(7)] == [True] * 4 + [False] * 3
    assert str(error.value).endswith("; and 3 more")


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (TimeoutError(), "rank 1 (node-1) at 127.0.0.1 port 9: no answer, packets to it or from it are lost"),
        (OSError(113, "No route to host"), "rank 1 (node-1) at 127.0.0.1 port 9: No route to host"),
        (OSError("unknown"), "rank 1 (node-1) at 127.0.0.1 port 9: unknown"),
    ],
)
def test_a_peer_that_cannot_be_reached_is_told_with_the_reason(monkeypatch, raised, words):
    """Lost packets look like no answer; every other error is the system's."""
    monkeypatch.setattr(socket, "create_connection", mock.Mock(side_effect=raised))
    with pytest.raises(LinkError) as error:
        steps.connect([arrival(1, 9, "secret")], "localhost", 1.0)
    assert str(error.value) == words


@pytest.fixture
def backends(monkeypatch):
    """Set whether torch sees a GPU, and whether it has NCCL."""

    def set_both(has_gpu: bool, has_nccl: bool) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
        monkeypatch.setattr(dist, "is_nccl_available", lambda: has_nccl)
        monkeypatch.setattr(dist, "is_gloo_available", lambda: True)

    return set_both


@pytest.mark.parametrize(
    ("wanted", "has_gpu", "has_nccl", "chosen"),
    [
        (None, True, True, "nccl"),
        (None, True, False, "gloo"),
        (None, False, True, "gloo"),
        ("nccl", True, True, "nccl"),
        ("gloo", True, True, "gloo"),
    ],
)
def test_the_backend_is_the_one_that_can_run(backends, wanted, has_gpu, has_nccl, chosen):
    """NCCL where there is a GPU for it, unless another one is asked for."""
    backends(has_gpu, has_nccl)
    assert steps.choose_backend(wanted) == chosen


@pytest.mark.parametrize(
    ("has_gpu", "words"),
    [
        (True, "this build of torch has no backend nccl; it has: gloo"),
        (False, "the backend nccl needs a GPU, and torch sees none here; --backend gloo does without"),
    ],
)
def test_a_backend_that_cannot_run_is_refused(backends, has_gpu, words):
    """With what is missing: the backend or the GPU."""
    backends(has_gpu, not has_gpu)
    with pytest.raises(StepError, match=words):
        steps.choose_backend("nccl")


def test_each_rank_has_a_gpu_of_its_own(monkeypatch):
    """That of its local rank, or an error that says how many there are, and which are hidden."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"H200 number {device.index}")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    device = steps.choose_device("nccl", 1)
    assert chosen == [device] == [torch.device("cuda", 1)]
    assert steps.device_name(device) == "H200 number 1"
    assert steps.versions("nccl").endswith("NCCL 2.27.3")
    with pytest.raises(
        StepError, match=r"local rank 2 has no GPU: torch sees 2 here \(CUDA_VISIBLE_DEVICES=4,5\)"
    ):
        steps.choose_device("nccl", 2)
    assert steps.choose_device("gloo", 2) == torch.device("cpu")


MEMBER = Member(1, 4, 1, "node", "node1", 29500, False, "/0")


@pytest.mark.parametrize(
    ("trouble", "backend", "words"),
    [
        (Trouble("links", "stopped by SIGTERM"), "gloo", "see which rank ended first"),
        (Trouble("barrier", "rank 3 failed first, in the step links"), "gloo", "cure that rank first"),
        (Trouble("barrier", "Connection reset by peer"), "gloo", "with dmesg for the out-of-memory killer"),
        (Trouble("links", "large packets may be lost"), "gloo", "ping -M do -s 1472"),
        (Trouble("backend", "no nccl"), "gloo", "compare what torch sees on each node: nanwatch doctor"),
        (Trouble("master", "refused"), "gloo", "nc -vz node1 29500"),
        (Trouble("store", "in use"), "gloo", "ss -ltnp | grep 29500"),
        (Trouble("device", "no memory"), "gloo", "free -h shows who holds the memory"),
        (Trouble("device", "no memory"), "nccl", "nvidia-smi shows who holds the GPU"),
        (Trouble("arrival", "missing: 3"), "gloo", "compare --nnodes, --nproc_per_node"),
        (Trouble("links", "refused"), "gloo", "choose the interface: GLOO_SOCKET_IFNAME=eth0|ib0"),
        (Trouble("all-reduce", "unhandled system error"), "nccl", "NCCL_DEBUG=INFO shows what NCCL tries"),
        (Trouble("all-reduce", "timeout"), "gloo", "GLOO_SOCKET_IFNAME=eth0|ib0; this host's own name means 127.0.1.1"),
    ],
)  # fmt: skip
def test_the_advice_fits_the_trouble(monkeypatch, trouble, backend, words):
    """A command to type, or a setting with its value."""
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")])
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    assert words in steps.advice(trouble, MEMBER, backend)


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("10.0.0.7", "GLOO_SOCKET_IFNAME=eth0"),
        (None, "this host's own name has no address, and gloo asks for it"),
    ],
)
def test_the_advice_looks_up_this_hosts_name(monkeypatch, address, words):
    """An address that others can use is no trouble, so the interface alone is left to choose."""
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0")])
    failure = socket.gaierror(-2, "Name or service not known")
    monkeypatch.setattr(
        socket, "gethostbyname", mock.Mock(return_value=address, side_effect=None if address else failure)
    )
    assert steps.advice(Trouble("all-reduce", "timeout"), MEMBER, "gloo").endswith(words)


def test_a_sum_that_is_wrong_is_seen(one_process_mesh, monkeypatch):
    """One element off by one in a quarter of a million: named with what it should be."""
    steps.all_reduce(torch.device("cpu"))

    def spoilt(x: torch.Tensor) -> None:
        x[200_000] += 1

    monkeypatch.setattr(dist, "all_reduce", spoilt)
    with pytest.raises(
        StepError, match=r"wrong in 1 of 262144 elements: element 200000 is \d+ and should be \d+"
    ):
        steps.all_reduce(torch.device("cpu"))


def test_rates_are_those_of_nccl_tests():
    """1 GB in a second over 4 ranks is 1 GB/s of algorithm and 1.5 GB/s of bus bandwidth."""
    assert steps.Transfer(10**9, 5, 1.0).rates(4) == (1e9, 1.5e9)


@pytest.mark.parametrize(
    ("size", "words"), [(64, "64 B"), (65536, "64 KiB"), (1 << 30, "1 GiB"), ((1 << 20) + 4, "1048580 B")]
)
def test_the_table_of_rates_has_sizes_and_units(size, words):
    """A row has the bytes of a rank, the time, and the rates in the unit that fits."""
    head, row = steps.transfer_lines([steps.Transfer(size, 5, 1e-3)], 2)
    assert head.split() == ["all-reduce", "time", "algorithm", "bus"]
    rate = size / 1e-3
    shown = f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.2f} MB/s"
    # Of two ranks the bus has as much as the algorithm.
    assert row.split() == [*words.split(), "1000.0", "µs", *shown.split(), *shown.split()]
    assert steps.transfer_lines([], 2) == []


def test_memory_that_reads_back_wrong_is_counted(monkeypatch):
    """Faulty memory can return a byte that nobody wrote."""
    full = torch.full

    def spoilt(*args, **kwargs):
        block = full(*args, **kwargs)
        block[7] ^= 1
        return block

    monkeypatch.setattr(torch, "full", spoilt)
    with pytest.raises(
        StepError, match="1 of 4096 bytes on cpu read back as something else than was written"
    ):
        steps.allocate(torch.device("cpu"), 4096)


def test_memory_that_is_not_there_is_named():
    """The bytes and the device are in the error."""
    with pytest.raises(StepError, match=r"1152921504606846976 bytes on cpu"):
        steps.allocate(torch.device("cpu"), 1 << 60)
