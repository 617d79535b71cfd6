"""Kills a process of vLLM at a random moment, and expects the others to end as they do unwatched.

    OMP_NUM_THREADS=1 python benchmarks/judge_vllm_shutdown.py [--trials 10] [--seed 0]

Needs vLLM (`make test-vllm` makes an environment with it) and nanwatch installed there. A job is a program that asks
for tokens, vLLM's engine and its worker, each in a process. One request in two reads a row of nan, so that findings are
told while the job ends. The victim gets SIGKILL or SIGTERM. A trial runs the job twice, unwatched and watched, and is
right if the same processes have ended within the bound, the program with the same status.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from judge_shutdown import become_subreaper, children, is_running

_BOUND = 30.0  # seconds
_NAN_ROW = 100
_ENDED = 7
VICTIMS = ("worker", "worker", "worker", "engine", "program")


class Ending(NamedTuple):
    """Status of the program, the names of processes that were left, and the time from the kill to the last end."""

    status: int | None
    left: tuple[str, ...]
    seconds: float


def save_model(folder: Path) -> None:
    """Save a Llama of two layers whose embedding has a row of nan."""
    import torch
    import transformers

    config: Any = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        head_dim=32, vocab_size=128, max_position_embeddings=128,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[_NAN_ROW] = float("nan")
    model.save_pretrained(folder)


def serve(folder: str) -> None:
    """Ask for tokens until the engine has died; `ready` is written after the first answer."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        folder, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", max_model_len=64, max_num_seqs=4,
        kv_cache_memory_bytes=16 << 20, distributed_executor_backend="mp",
    )  # fmt: skip
    asked = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, detokenize=False)
    healthy, bad = [*range(3, 20)], [*range(3, 19), _NAN_ROW]
    try:
        while True:
            engine.generate([{"prompt_token_ids": ids} for ids in (healthy, bad)], asked, use_tqdm=False)
            Path(folder, "ready").touch()
    except Exception as error:
        print("the engine ended:", type(error).__name__, flush=True)
        sys.exit(_ENDED)


def descendants(pid: int) -> list[int]:
    """Return the processes below one, parents first."""
    found = children(pid)
    for child in found:
        found += children(child)
    return found


def name_of(pid: int) -> str:
    """Return what a process calls itself; vLLM names its processes. A process that has ended has no name."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()[:60]
    except OSError:
        return ""


def run(folder: Path, output: Path, chance: random.Random, is_watched: bool) -> Ending:
    """Run the job and kill one of its processes."""
    (folder / "ready").unlink(missing_ok=True)
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1"}
    environment["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    environment["NANWATCH"] = str(int(is_watched))
    victim, death, moment = (
        chance.choice(VICTIMS),
        chance.choice(("SIGKILL", "SIGTERM")),
        chance.uniform(0.0, 1.5),
    )
    with output.open("w") as file:
        job = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(folder)], env=environment, stdout=file, stderr=file
        )
    while not (folder / "ready").exists():
        if job.poll() is not None:
            raise SystemExit(f"vLLM ended with {job.returncode}:\n{output.read_text()[-3000:]}")
        time.sleep(0.05)
    time.sleep(moment)
    below = descendants(job.pid)
    names = {pid: name_of(pid) for pid in (job.pid, *below)}
    place = {"engine": "EngineCore", "worker": "Worker"}.get(victim)
    chosen = next((pid for pid in below if place in names[pid]), None) if place else job.pid
    if chosen is None:
        raise SystemExit(f"no process of vLLM is called {place}, only {', '.join(names.values())}")
    killed = time.monotonic()
    os.kill(chosen, getattr(signal, death))
    while any(map(is_running, names)) and time.monotonic() < killed + _BOUND:
        job.poll()
        for pid in below:  # those whose parent has ended are children of this process
            if pid in children(os.getpid()):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)
    seconds = time.monotonic() - killed
    left = [pid for pid in names if is_running(pid)]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    print(
        f"  {'watched' if is_watched else 'unwatched'}: {death} to the {victim} after {moment:.2f} s", end=""
    )
    print(f", ended with {job.poll()} after {seconds:.1f} s", flush=True)
    return Ending(job.wait(), tuple(sorted(names[pid] for pid in left)), seconds)


def main() -> None:
    """Run the trials."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
    become_subreaper()
    num_wrong = num_told = num_hung = 0
    slowest = [0.0, 0.0]
    with tempfile.TemporaryDirectory() as top:
        folder, output = Path(top, "model"), Path(top, "output")
        save_model(folder)
        for number in range(options.trials):
            endings = []
            for is_watched in (False, True):
                endings.append(run(folder, output, random.Random(options.seed + number), is_watched))
                if not endings[-1].left:
                    slowest[is_watched] = max(slowest[is_watched], endings[-1].seconds)
            num_told += "nanwatch: request" in output.read_text()
            is_right = endings[0][:2] == endings[1][:2]
            num_wrong += not is_right
            num_hung += is_right and bool(endings[1].left)
            print(number, "right" if is_right else "WRONG", *endings, flush=True)
            if not is_right:
                print(output.read_text()[-3000:])
    print(
        f"{options.trials} trials, {num_wrong} wrong; in {num_hung} of the others processes were left, unwatched and"
        f" watched; a finding was told in {num_told}; the slowest end of all came {slowest[0]:.1f} s after the kill"
        f" unwatched, {slowest[1]:.1f} s watched"
    )
    sys.exit(num_wrong > 0)


if __name__ == "__main__":
    main()
