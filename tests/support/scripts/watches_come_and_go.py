"""Threads that call a model and run its backward while watches of it begin and end; `SECONDS` is the argument."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
import traceback

import torch
from torch import nn

import nanwatch


def main() -> int:
    faulthandler.enable()
    torch.set_num_threads(1)
    sys.setswitchinterval(1e-6)
    model = nn.Sequential(*[nn.Linear(16, 16) for _ in range(20)])
    until = time.monotonic() + float(sys.argv[1])
    wrong: list[str] = []

    def work(trains: bool) -> None:
        while time.monotonic() < until and not wrong:
            try:
                with torch.set_grad_enabled(trains):
                    output = model(torch.ones(2, 16))
                if trains:
                    output.sum().backward()
            except BaseException:
                wrong.append(traceback.format_exc())

    threads = [threading.Thread(target=work, args=(trains,)) for trains in (True, True, False)]
    for thread in threads:
        thread.start()
    count = 0
    while time.monotonic() < until and not wrong:
        watch = nanwatch.watch(model, gradients=count % 2 == 0, on_nonfinite="record", forecast=False)
        time.sleep(0.001 * (count % 4))
        watch.stop()
        count += 1
    for thread in threads:
        thread.join()
    sys.stdout.write("\n".join([f"{count} watches", *wrong]) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
