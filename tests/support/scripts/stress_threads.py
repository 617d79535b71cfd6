"""Four threads around one model with random actions; exit status 1 when nanwatch loses or invents anything.

    python stress_threads.py [SECONDS [SEED]]     run with MALLOC_PERTURB_=165 to make freed memory look different

Each thread calls the model with a batch size of its own, so that a failure shows whose batch it is from. What is
asserted: a batch with a planted nan raises, in the thread that planted it, an error about that thread's batch; no other
batch raises; the weight's range in a frame is what a plain reader finds; a saved model holds nothing of a watch.
"""

from __future__ import annotations

import copy
import faulthandler
import gc
import io
import os
import pickle
import random
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.numerics import _extension

WIDTH = 1024
THREADS = 4


class Model(nn.Module):
    """A frozen weight of 4 MiB that one thread writes, and a small part for each thread to train."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.table.requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)) for _ in range(THREADS)
        )

    def forward(self, rows: Tensor, offset: Tensor) -> Tensor:
        return self.heads[len(rows) - 1](self.norm(self.table(rows)) + offset)


class Stress:
    """The state that the threads share, and one method for each action."""

    def __init__(self, seconds: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.seed = seed
        self.until = time.monotonic() + seconds
        self.model = Model()
        with torch.no_grad():
            self.model.table.weight.clamp_(-1, 1)
        self.watch = nanwatch.watch(
            self.model, rerun=False, forecast=False, max_frames=64, gradients=bool(seed % 2)
        )
        self.unwatched = pickle.dumps(copy.deepcopy(self.model))
        self.optimizers = [torch.optim.SGD(head.parameters(), lr=1e-6) for head in self.model.heads]
        self.wrong: list[str] = []
        self.done: Counter[str] = Counter()
        self.written = 1.0

    def batch(self, me: int, *, bad: bool = False) -> tuple[Tensor, Tensor]:
        offset = torch.zeros(me + 1, WIDTH)
        if bad:
            offset[me, 3] = float("nan")
        return torch.randint(0, WIDTH, (me + 1,)), offset

    def call(self, me: int, *, bad: bool, grad: bool) -> Tensor | None:
        """Call the model; check that it raises for a planted nan, about this thread's batch, and only then."""
        try:
            with torch.set_grad_enabled(grad):
                output = self.model(*self.batch(me, bad=bad))
        except nanwatch.NonFiniteError as error:
            finding = error.report.finding
            if not bad:
                self.wrong.append(f"thread {me} got a failure of another batch: {finding}")
            elif finding is None or finding.numel != (me + 1) * WIDTH:
                self.wrong.append(f"thread {me} got the finding of another thread: {finding}")
            return None
        if bad:
            self.wrong.append(f"the failure of thread {me} was lost")
        return output

    def train(self, me: int, bad: bool) -> None:
        optimizer = self.optimizers[me]
        output = self.call(me, bad=bad, grad=True)
        if output is not None:
            output.mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def evaluate(self, me: int, bad: bool) -> None:
        self.call(me, bad=bad, grad=False)

    def save(self, me: int, bad: bool) -> None:
        file = io.BytesIO()
        torch.save(self.model, file)
        names = {name for name in file.getvalue().split(b"\n") if b"nanwatch" in name}
        if names:
            self.wrong.append(f"a saved model holds {names}")
        if any("nanwatch" in str(type(value)) for value in vars(copy.deepcopy(self.model)).values()):
            self.wrong.append("a copied model holds a part of the watch")
        self.model.state_dict()

    def restart(self, me: int, bad: bool) -> None:
        """Another watch of the same model comes and goes, with options of another kind each time."""
        told: list[nanwatch.Report] = []
        other = nanwatch.watch(
            self.model,
            on_nonfinite=told.append,
            gradients=bool(self.done["restart"] % 2),
            check=("batch", "module")[self.done["restart"] // 2 % 2],  # type: ignore[arg-type]
            rerun=False,
            forecast=False,
        )
        try:
            self.call(me, bad=bad, grad=bool(self.done["restart"] % 3))
            other.report()
            repr(other.counters)
        finally:
            other.stop()

    def write(self, me: int, bad: bool) -> None:
        """Make the weight's largest element a little larger, past nothing and past the version counter in turn."""
        if me != 0:
            return
        self.written += 1.0
        with torch.no_grad():
            self.model.table.weight[1, 1] = self.written
        self.call(me, bad=False, grad=False)
        for frame in reversed(self.watch.frames):
            if frame.name == "table" and any(r.role == "output" and r.shape[0] == 1 for r in frame.records):
                weight = next(r for r in frame.records if r.role == "weight")
                if weight.abs_max != self.written:
                    self.wrong.append(f"a stale range: {weight.abs_max} where {self.written} stands")
                return

    def swap(self, me: int, bad: bool) -> None:
        """Put another weight in place, so that the old one is freed while others may read it."""
        if me != 0:
            return
        with torch.no_grad():
            self.model.table.weight = nn.Parameter(self.model.table.weight.clone(), requires_grad=False)

    def collect(self, me: int, bad: bool) -> None:
        gc.collect()

    def work(self, me: int) -> None:
        chance = random.Random(self.seed * 1000 + me)
        actions: list[Callable[[int, bool], None]] = [
            *(2 * [self.train]),
            *(3 * [self.evaluate]),
            *(2 * [self.write]),
            self.save,
            self.restart,
            self.swap,
            self.collect,
        ]
        while time.monotonic() < self.until and len(self.wrong) < 5:
            action = chance.choice(actions)
            try:
                action(me, chance.random() < 0.2)
            except BaseException:
                self.wrong.append(traceback.format_exc())
            self.done[action.__name__] += 1


def main() -> int:
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 60.0
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    faulthandler.enable()
    faulthandler.dump_traceback_later(seconds + 120, exit=True)
    warnings.simplefilter("ignore")
    sys.setswitchinterval(1e-6)
    torch.set_num_threads(1)
    stress = Stress(seconds, seed)
    threads = [threading.Thread(target=stress.work, args=(me,)) for me in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stress.watch.stop()
    if pickle.dumps(Model()).count(b"nanwatch"):
        stress.wrong.append("a new model holds a part of a watch")
    about = f"compiled part: {_extension.C is not None}, pid {os.getpid()}, actions: {dict(stress.done)}"
    sys.stdout.write("\n".join([about, *(stress.wrong or ["nothing wrong"])]) + "\n")
    return 1 if stress.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
