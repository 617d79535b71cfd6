"""Ranks as processes; those of netcheck, and the lines that they print."""

import os
import re
import socket
import subprocess
import sys
from collections.abc import Sequence

from support.processes import PYTHONPATH, forking_python

HOST = socket.gethostname()
MARGIN = 30  # seconds beyond the timeout: a busy machine takes long to import torch in several processes


def rank_environment(**changes: str) -> dict[str, str]:
    launchers = "TORCHELASTIC", "SLURM", "NANWATCH", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_"
    kept = {k: v for k, v in os.environ.items() if k == "NANWATCH_EXT" or not k.startswith(launchers)}
    return kept | {"PYTHONPATH": PYTHONPATH, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} | changes


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def run_ranks(
    world_size: int, command: Sequence[str], seconds: float
) -> list[subprocess.CompletedProcess[str]]:
    """Python with this command, a process a rank and no launcher; what each of them left when all had ended."""
    ranks = Ranks()
    try:
        for rank in range(world_size):
            ranks.start(rank, world_size, program=command)
        return [
            subprocess.CompletedProcess(command, process.returncode, *texts)
            for process in ranks.started.values()
            for texts in [process.communicate(timeout=seconds)]
        ]
    finally:
        ranks.kill()


class Ranks:
    """Ranks started by hand, as many as asked for."""

    def __init__(self) -> None:
        self.started: dict[int, subprocess.Popen[str]] = {}
        self.port = free_port()

    def start(
        self,
        rank: int,
        world_size: int,
        *arguments: str,
        program: Sequence[str] = ("-m", "nanwatch.netcheck"),
        is_forked: bool = True,
        **changes: str,
    ) -> subprocess.Popen[str]:
        """Start a rank. SIGSTOP does not reach a forked one."""
        place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
        place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        line = [forking_python() if is_forked else sys.executable, *program, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        self.started[rank] = subprocess.Popen(line, env=rank_environment(**place | changes), **pipes)
        return self.started[rank]

    def end_of(self, rank: int, seconds: float) -> tuple[int, str]:
        out, _ = self.started[rank].communicate(timeout=seconds)
        return self.started[rank].returncode, out

    def kill(self) -> None:
        for process in self.started.values():
            if process.poll() is None:
                process.kill()
            process.communicate()


def field(name: str, out: str) -> str:
    """Return what netcheck says behind `step:` or `why:`."""
    match = re.search(rf"^    {name}: +(.*)$", out, re.MULTILINE)
    assert match, out
    return match[1]
