"""Signals that come while a batch is run again, and code that ends the program when it is called once too often.

A process of its own sends each signal, at a random moment after the bad batch began. Unwatched it finds the program
waiting for it at the end of that batch. The report is read from `output_dir`, as a signal's exception may take the
place of NonFiniteError.
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import time

import torch
from reruns.case import NonFinite, case, ends, note, tell, watch
from torch import nn


class Slow(nn.Module):
    """Takes 0.15 s, so that the moment is mostly one of a re-run."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x, mask):
        self.calls += 1
        time.sleep(0.15)
        return (self.linear(x).mean(-1) * mask).sum() / mask.sum()  # FAULT sig*


def send(number, to=None):
    """Send the signal to this process from another one, in 0.2 to 0.6 s."""
    pid = os.getpid() if to is None else to
    wait = random.Random().uniform(0.2, 0.6)
    return subprocess.Popen(["sh", "-c", f"sleep {wait:.3f}; kill -s {number.value} -- {pid}"])


def train(model, number, to=None, told=False, **options):
    """Train four batches. The signal comes during the third, which is bad."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True, output_dir="reports", **options)
    senders = []
    try:
        for i in range(4):
            note(batch=i)
            if i == 2:
                senders.append(send(number, to))
            optimizer.zero_grad()
            try:
                model(torch.randn(3, 4), torch.full((3,), float(i != 2))).backward()
                optimizer.step()
            except NonFinite as error:
                if told:
                    tell(error)
            if i == 2:
                time.sleep(1.0)  # by then it has come
    finally:
        for one in senders:
            one.wait()


@case()
def sigterm_whose_handler_exits():
    signal.signal(signal.SIGTERM, lambda *_: exec("raise SystemExit(143)"))
    train(Slow(), signal.SIGTERM)


@case()
def sigint_as_python_handles_it():
    signal.signal(signal.SIGINT, signal.default_int_handler)
    model = Slow()
    try:
        train(model, signal.SIGINT)
    finally:
        note(calls=model.calls)


@case()
def sigint_of_a_terminal():
    """Ctrl-C: the whole group of processes gets it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    train(Slow(), signal.SIGINT, to=-os.getpgrp())


@case(finding=False)
def sigterm_without_a_handler():
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    train(Slow(), signal.SIGTERM)


@case("div", cure=True)
def sigusr1_whose_handler_counts():
    received, model = [], Slow()
    signal.signal(signal.SIGUSR1, lambda number, frame: received.append((number, os.getpid())))
    train(model, signal.SIGUSR1, told=True)
    is_ours = [pid == os.getpid() for _, pid in received]
    return {"received": is_ours, "calls": model.calls, **ends(model)}


class PreemptedError(Exception):
    """What the handler of the program raises, and its loop expects."""


@case()
def sigterm_whose_exception_the_loop_catches():
    def handler(number, frame):
        raise PreemptedError

    signal.signal(signal.SIGTERM, handler)
    model, saved = Slow(), []
    try:
        train(model, signal.SIGTERM)
    except PreemptedError:
        saved.append(model.calls)
    return {"saved": saved, **ends(model)}


@case("div", cure=True)
def sigalrm_beats_all_the_time():
    beats, model = [], Slow()
    signal.signal(signal.SIGALRM, lambda *_: beats.append(time.monotonic()))
    signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for i in range(3):
        optimizer.zero_grad()
        try:
            model(torch.randn(3, 4), torch.full((3,), float(i != 1))).backward()
            optimizer.step()
        except NonFinite as error:
            tell(error)
    pauses = [b - a for a, b in itertools.pairwise(beats)]
    signal.setitimer(signal.ITIMER_REAL, 0)
    return {"beats": len(beats) > 5, "paused": max(pauses) > 5, "calls": model.calls, **ends(model)}


class ArmsATimer(nn.Module):
    """Arms it in its second call, which is a re-run if one makes it so."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 2:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        for _ in range(20):
            time.sleep(0.01)
        return x / (x - x)  # FAULT


@case("div")
def sigalrm_of_a_timer_that_the_forward_arms():
    def alarm(*_):
        raise SystemExit(143)

    signal.signal(signal.SIGALRM, alarm)
    model = ArmsATimer()
    watch(model)
    for step in range(3):
        note(step=step, calls=model.calls)
        try:
            model(torch.ones(2))
        except NonFinite as error:
            tell(error)


@case("div", cure=True)
def sigchld_whose_handler_reaps():
    """A supervisor that waits for any child, and counts them."""
    reaped, model = [], nn.Linear(4, 2)

    def reap(*_):
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            reaped.append(status)

    signal.signal(signal.SIGCHLD, reap)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for i in range(3):
        mask = torch.full((3,), float(i != 1))
        loss = (model(torch.randn(3, 4)).square().mean(-1) * mask).sum() / mask.sum()  # FAULT
        optimizer.zero_grad()
        try:
            loss.backward()
            optimizer.step()
        except NonFinite as error:
            tell(error)
    return {"reaped": reaped, **ends(model)}


def trained(model, loss_of):
    """Train two batches, the first one bad."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for i in range(2):
        optimizer.zero_grad()
        try:
            loss_of(model(torch.randn(3, 4)), torch.full((3,), float(i))).backward()
            optimizer.step()
        except NonFinite as error:
            tell(error)


@case("div", cure=True)
def exit_of_a_loss_that_is_called_again():
    model, calls = nn.Linear(4, 2), []

    def loss_of(out, mask):
        calls.append(1)
        if len(calls) > 2:
            raise SystemExit(7)
        return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

    trained(model, loss_of)
    return {"calls": len(calls), **ends(model)}


@case("div", cure=True)
def interrupt_of_a_loss_that_is_called_again():
    model, calls = nn.Linear(4, 2), []

    def loss_of(out, mask):
        calls.append(1)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return (out.square().mean(-1) * mask).sum() / mask.sum()  # FAULT

    trained(model, loss_of)
    return {"calls": len(calls), **ends(model)}


class Budget(nn.Module):
    """Ends the program, or its generator, after so many calls."""

    def __init__(self, most, end):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.left, self.end = most, end

    def forward(self, x, mask):
        self.left -= 1
        if self.left < 0:
            self.end()
        return (self.linear(x).mean(-1) * mask).sum() / mask.sum()  # FAULT exit_*of_a_forward


def by_budget(end):
    """Train two batches, the first one bad, with a budget of two calls."""
    model = Budget(2, end)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    watch(model, gradients=True)
    for i in range(2):
        optimizer.zero_grad()
        try:
            model(torch.randn(3, 4), torch.full((3,), float(i))).backward()
            optimizer.step()
        except NonFinite as error:
            tell(error)
    return {"left": model.left, **ends(model)}


@case("div", cure=True)
def exit_at_once_of_a_forward():
    return by_budget(lambda: os._exit(3))


@case("div", cure=True)
def exit_of_the_generator_of_a_forward():
    def end():
        raise GeneratorExit

    return by_budget(end)


@case("div", cure=True)
def exit_by_abort_of_a_forward():
    return by_budget(os.abort)
