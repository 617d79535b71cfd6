"""Locks, conditions and queues that the loss or the forward takes."""

from __future__ import annotations

import queue
import threading

import torch
from reruns.case import NonFinite, case, ends, tell, watch
from torch import nn


def train(model, loss_of, held=None, batches=4):
    """Train with a mask that is empty once. The loop holds a lock round the backward and the step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for i in range(batches):
        optimizer.zero_grad()
        loss = loss_of(model(torch.randn(3, 4)), torch.full((3,), float(i != 2)))
        try:
            if held is None:
                loss.backward()
                optimizer.step()
            else:
                with held:
                    loss.backward()
                    optimizer.step()
        except NonFinite as error:
            tell(error)


@case("div", cure=True, once="in-process")
def lock_that_the_loop_holds():
    model, lock, calls = nn.Linear(4, 2), threading.Lock(), []

    def loss_of(out, mask):
        with lock:  # ONCE
            calls.append(1)
            return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

    train(model, loss_of, lock)
    return {"calls": calls, "locked": lock.locked(), **ends(model)}


@case("div", cure=True)
def rlock_that_the_loop_holds():
    model, lock, depth = nn.Linear(4, 2), threading.RLock(), []

    def loss_of(out, mask):
        with lock:
            depth.append(len(depth))
            return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

    train(model, loss_of, lock)
    is_free = lock.acquire(blocking=False)
    return {"depth": depth, "free": is_free, **ends(model)}


@case("div", cure=True)
def semaphore_with_one_place():
    model, places, waited = nn.Linear(4, 2), threading.BoundedSemaphore(1), []

    def loss_of(out, mask):
        with places:
            waited.append(out.shape[0])
            return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

    train(model, loss_of, places)
    return {"waited": waited, "free": places.acquire(blocking=False), **ends(model)}


class Guarded(nn.Module):
    """A forward below a lock of its own, which a thread of statistics holds for most of the time."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.lock = threading.Lock()
        self.calls = 0

    def forward(self, x):
        with self.lock:  # ONCE
            self.calls += 1
            d = (self.linear(x) * (self.calls != 3)).square().sum(-1)
            return d.sqrt()  # FAULT


@case("sqrt", cure=True, once=True)
def lock_that_another_thread_often_holds():
    model, done = Guarded(), threading.Event()

    def reads():
        while not done.is_set():
            with model.lock:
                done.wait(0.02)
            done.wait(0.001)

    reader = threading.Thread(target=reads)
    reader.start()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for _ in range(5):
        optimizer.zero_grad()
        try:
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
        except NonFinite as error:
            tell(error)
    done.set()
    reader.join()
    return {"calls": model.calls, "locked": model.lock.locked(), **ends(model)}


@case("div", once=True)
def lock_that_another_thread_holds_until_the_step():
    """The thread gets the lock after the loss, and gives it back when the step is over: a re-run cannot have it."""
    model, lock = nn.Linear(4, 2), threading.Lock()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    taken, over = threading.Event(), threading.Event()

    def holds():
        with lock:
            taken.set()
            over.wait()

    def loss_of(out, mask):
        with lock:  # ONCE
            return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

    for i in range(3):
        optimizer.zero_grad()
        loss = loss_of(model(torch.randn(3, 4)), torch.full((3,), float(i != 1)))
        thread = threading.Thread(target=holds)
        thread.start()
        taken.wait()
        try:
            loss.backward()
            optimizer.step()
        except NonFinite as error:
            tell(error)
        over.set()
        thread.join()
        taken.clear()
        over.clear()
    return {"locked": lock.locked(), **ends(model)}


@case("div", cure=True)
def condition_that_the_loss_notifies():
    model, changed, versions = nn.Linear(4, 2), threading.Condition(), []

    def loss_of(out, mask):
        with changed:
            versions.append(len(versions))
            changed.notify_all()
        return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

    seen = []

    def follows():
        with changed:
            changed.wait_for(lambda: len(versions) >= 4)
            seen.append(len(versions))

    thread = threading.Thread(target=follows)
    thread.start()
    train(model, loss_of)
    thread.join()
    return {"versions": versions, "seen": seen, **ends(model)}


@case("div", once=True)
def queue_that_the_loss_reads():
    model, masks, log = nn.Linear(4, 2), queue.Queue(), queue.Queue()
    for i in range(4):
        masks.put(torch.full((3,), float(i != 2)))

    def loss_of(out, _):
        mask = masks.get()  # ONCE
        log.put(mask.sum().item())
        return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

    train(model, loss_of)
    logged = [log.get_nowait() for _ in range(log.qsize())]
    return {"left": masks.qsize(), "logged": logged, **ends(model)}


class FromQueue(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scales = queue.SimpleQueue()

    def forward(self, x):
        scale = self.scales.get()  # ONCE
        return self.linear(x) * scale / scale  # FAULT


@case("div", once=True)
def queue_that_the_forward_reads():
    """Another thread puts what the forward takes; the last get of a re-run would wait for ever."""
    model, asked = FromQueue(), threading.Semaphore(0)

    def feeds():
        for i in range(4):
            asked.acquire()
            model.scales.put(torch.tensor(float(i != 2)))

    feeder = threading.Thread(target=feeds)
    feeder.start()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for _ in range(4):
        optimizer.zero_grad()
        asked.release()
        try:
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
        except NonFinite as error:
            tell(error)
    feeder.join()
    return {"left": model.scales.qsize(), **ends(model)}
