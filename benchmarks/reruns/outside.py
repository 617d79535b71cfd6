"""What reaches out of the process: files, pipes, sockets, other processes, shared memory, the environment."""

from __future__ import annotations

import csv
import logging
import multiprocessing
import os
import socket
import sqlite3
import subprocess
import tempfile
import threading
import warnings
from pathlib import Path

import numpy as np
import torch
from reruns.case import NonFinite, case, ends, tell, watch
from torch import nn


def train(model, loss_of, batches=4):
    """Train with a mask that is empty once."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for i in range(batches):
        optimizer.zero_grad()
        loss = loss_of(model(torch.randn(3, 4)), torch.full((3,), float(i != 2)))
        try:
            loss.backward()
            optimizer.step()
        except NonFinite as error:
            tell(error)
    return ends(model)


@case("div", cure=True, once=True)
def file_that_stays_open():
    """Its buffer is not empty when a child is forked, and a child that ends in order would write it."""
    with open("log.txt", "w", encoding="utf-8") as log:

        def loss_of(out, mask):
            log.write(f"mask {mask.sum().item()}\n")  # ONCE
            return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

        state = train(nn.Linear(4, 2), loss_of)
    return {"log": Path("log.txt").read_text(encoding="utf-8"), **state}


class AppendsToAFile(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, mask):
        with open("calls.txt", "a", encoding="utf-8") as file:  # ONCE
            file.write("call\n")  # ONCE
        return (self.linear(x).mean(-1) * mask).sum() / mask.sum()  # FAULT


@case("div", cure=True, once=True)
def file_that_a_forward_appends_to():
    model = AppendsToAFile()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for i in range(4):
        optimizer.zero_grad()
        try:
            model(torch.randn(3, 4), torch.full((3,), float(i != 2))).backward()
            optimizer.step()
        except NonFinite as error:
            tell(error)
    return {"calls": Path("calls.txt").read_text(encoding="utf-8"), **ends(model)}


@case("div", cure=True, once=True)
def file_of_a_logger():
    logger = logging.getLogger("training")
    logger.setLevel(logging.INFO)
    handler = logging.FileHandler("training.log")
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)

    def loss_of(out, mask):
        loss = (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT
        logger.info("loss %s", loss.item())  # ONCE
        return loss

    state = train(nn.Linear(4, 2), loss_of)
    handler.close()
    return {"log": Path("training.log").read_text(encoding="utf-8"), **state}


@case("div", cure=True, once=True)
def file_of_a_csv_writer():
    with open("metrics.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        rows = []

        def loss_of(out, mask):
            rows.append(len(rows))
            writer.writerow([len(rows), mask.sum().item()])  # ONCE
            file.flush()  # ONCE
            return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

        state = train(nn.Linear(4, 2), loss_of)
    return {"csv": Path("metrics.csv").read_text(encoding="utf-8"), "rows": rows, **state}


@case("div", cure=True, once=True)
def file_of_a_checkpoint_for_each_call():
    def loss_of(out, mask):
        number = len(list(Path().glob("out-*.pt")))
        torch.save(out.detach(), f"out-{number}.pt")  # ONCE
        return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

    state = train(nn.Linear(4, 2), loss_of)
    return {"files": sorted(x.name for x in Path().glob("*.pt")), **state}


@case("div", cure=True, once=True)
def file_that_is_temporary():
    spilt = []

    def loss_of(out, mask):
        with tempfile.NamedTemporaryFile(dir=".", suffix=".npy", delete=False) as file:  # ONCE
            np.save(file, out.detach().numpy())  # ONCE
        spilt.append(Path(file.name).suffix)
        return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

    state = train(nn.Linear(4, 2), loss_of)
    return {"spilt": spilt, "files": len(list(Path().glob("*.npy"))), **state}


@case("div", cure=True, once=True)
def file_of_a_database():
    base = sqlite3.connect("runs.db")
    base.execute("create table loss (size real)")

    def loss_of(out, mask):
        base.execute("insert into loss values (?)", (mask.sum().item(),))  # ONCE
        base.commit()  # ONCE
        return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

    state = train(nn.Linear(4, 2), loss_of)
    rows = base.execute("select size from loss").fetchall()
    base.close()
    return {"rows": rows, **state}


@case("div", cure=True, once=True)
def socket_with_a_server():
    ours, theirs = socket.socketpair()
    asked = []

    def serves():
        while (message := theirs.recv(64)) not in (b"", b"end"):
            asked.append(message.decode())
            theirs.sendall(b"%d" % (len(asked) != 3))

    server = threading.Thread(target=serves)
    server.start()

    def loss_of(out, _):
        ours.sendall(b"mask")  # ONCE
        mask = torch.full((3,), float(ours.recv(64)))  # ONCE
        return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

    try:
        state = train(nn.Linear(4, 2), loss_of)
    finally:
        ours.sendall(b"end")
        server.join()
        ours.close()
        theirs.close()
    return {"asked": asked, **state}


class WritesAPipe(nn.Module):
    def __init__(self, end):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.end = end

    def forward(self, x):
        h = self.linear(x)
        os.write(self.end, b".")  # ONCE
        return h


@case("sqrt", once=True)
def pipe_that_a_forward_writes():
    reading, writing = os.pipe()
    model = WritesAPipe(writing)

    def loss_of(out, mask):
        return (out * mask[:, None]).square().sum(-1).sqrt().mean()  # FAULT

    state = train(model, loss_of)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        return {"read": len(file.read()), **state}


@case("div", cure=True, once=True)
def process_that_the_loss_starts():
    def loss_of(out, mask):
        subprocess.run(["sh", "-c", "echo called >> calls.txt"], check=True)  # ONCE
        return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

    state = train(nn.Linear(4, 2), loss_of)
    return {"calls": Path("calls.txt").read_text(encoding="utf-8"), **state}


@case("div", cure=True)
def environment_that_the_loss_sets():
    def loss_of(out, mask):
        os.environ["CALLS"] = str(int(os.environ.get("CALLS", "0")) + 1)
        if os.environ["CALLS"] == "2":
            mask = mask * 0
        return (out.square().mean(-1) * mask.abs()).sum() / mask.abs().sum()  # FAULT

    state = train(nn.Linear(4, 2), loss_of, batches=2)
    return {"calls": os.environ["CALLS"], **state}


@case("div", cure=True, once=True)
def memory_that_is_a_file():
    counts = np.memmap("counts.bin", dtype="int64", mode="w+", shape=(2,))

    def loss_of(out, mask):
        counts[0] += 1  # ONCE
        counts[1] += int(mask.sum())  # ONCE
        return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

    state = train(nn.Linear(4, 2), loss_of)
    return {"counts": counts.tolist(), **state}


@case("div", cure=True, once=True)
def memory_that_tensors_share():
    counts = torch.zeros(2).share_memory_()

    def loss_of(out, mask):
        counts[0] += 1  # ONCE
        counts[1] += mask.sum()  # ONCE
        return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

    state = train(nn.Linear(4, 2), loss_of)
    return {"counts": counts.tolist(), **state}


@case("div", cure=True, once=True)
def memory_of_a_shared_value():
    calls = multiprocessing.Value("i", 0)

    def loss_of(out, mask):
        with calls.get_lock():  # ONCE
            calls.value += 1  # ONCE
        return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

    state = train(nn.Linear(4, 2), loss_of)
    return {"calls": calls.value, **state}


@case("div", cure=True)
def warnings_that_are_shown_once():
    warnings.resetwarnings()
    warnings.simplefilter("ignore", DeprecationWarning)
    shown = []

    def show(message, category, filename, lineno, file=None, line=None):
        if Path(filename).name == "outside.py":
            shown.append(str(message))

    warnings.showwarning = show

    def loss_of(out, mask):
        warnings.warn(f"{int(mask.sum())} of 3 rows", stacklevel=1)
        if mask.sum() == 0:
            warnings.simplefilter("once")
        return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

    state = train(nn.Linear(4, 2), loss_of)
    return {"shown": shown, **state}
