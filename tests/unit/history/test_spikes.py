"""watching.watch(spikes=True): what it gathers, what it tells, and that it harms nothing."""

import gc
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.history.spikes import cause_of
from nanwatch.report.events import Departure, SpikeReport
from support import watching

AT, STEPS = 60, 64


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def train(net, watch, *, target=1000.0, rate=1e-2, steps=STEPS, scales=False) -> list[float]:
    """Return the losses. In step AT one sample has this target, and the learning rate is this one.

    The watch gets the losses of the samples, or, with `scales`, a scaled loss by the backward alone.
    """
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", growth_interval=7, enabled=scales)
    losses = []
    for step in range(steps):
        drawn = torch.Generator().manual_seed(step)
        x = torch.randn(32, 6, generator=drawn)
        y = x.sum(1, keepdim=True) + 0.5 * torch.randn(32, 1, generator=drawn)
        if step == AT:
            y[5] = target
        optimizer.param_groups[0]["lr"] = rate if step == AT else 1e-2
        optimizer.zero_grad()
        loss = (net(x) - y).square().flatten()
        if not scales:
            watch.note_loss(loss)
        scaler.scale(loss.mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.mean().item())
    return losses


def test_sample_with_a_bad_target_is_named_with_its_share(tmp_path: Path) -> None:
    net = model()
    with (
        watching.watch(net, spikes=True, output_dir=tmp_path) as watch,
        pytest.warns(RuntimeWarning, match="spike in batch 60: loss"),
    ):
        train(net, watch)
    (report,) = watch.spikes
    assert (report.batch, report.cause, report.shares[0][0]) == (AT, "loss", 5)
    assert report.shares[0][1] > 0.99
    folder = tmp_path / f"spike-batch-{AT}"
    assert SpikeReport.from_json((folder / "report.json").read_text()) == report
    names = [Path(file).name for file in report.files]
    assert names == ["capsule", "report.html", "report.json", "report.txt"]
    assert report.headline in (folder / "report.txt").read_text()
    assert "<table" in (folder / "report.html").read_text()
    # The capsule has the weights from before the step, so its replay gives the output of that batch.
    capsule = nanwatch.Capsule.open(folder / "capsule")
    assert torch.equal(capsule.args[0], torch.randn(32, 6, generator=torch.Generator().manual_seed(AT)))
    assert nanwatch.replay(folder / "capsule", model()).finding is None


def test_training_computes_the_same() -> None:
    """The oracle is a run without a watch, spike included. The loss is known from the backward."""
    gc.collect()  # GradScalers of earlier tests
    bare, watched = model(), model()
    with watching.watch(bare, enabled=False) as watch:
        losses = train(bare, watch, scales=True)
    with watching.watch(watched, spikes=True) as watch, pytest.warns(RuntimeWarning):
        assert train(watched, watch, scales=True) == losses
    (spike,) = watch.spikes
    assert (spike.jumps[0].label, spike.jumps[0].value) == ("loss", pytest.approx(losses[AT]))
    assert all(map(torch.equal, bare.parameters(), watched.parameters()))


@pytest.mark.filterwarnings("error")
def test_evaluation_is_no_part_of_the_histories() -> None:
    net = model()
    with watching.watch(net, spikes=True) as watch:
        for _ in range(5):
            train(net, watch, steps=16)
            with torch.no_grad():
                net(1000 * torch.randn(4, 6))
    assert watch.spikes == ()


@pytest.mark.parametrize("batches", [(), (0,)])
def test_learning_rate_that_jumps_is_named(batches: tuple[int, ...], tmp_path: Path) -> None:
    net, trace = model(), nanwatch.Trace(tmp_path / "run.parquet", batches=batches)
    with watching.watch(net, spikes=True, trace=trace) as watch, pytest.warns(RuntimeWarning, match="rate"):
        train(net, watch, target=0.0, rate=100.0)
    (report,) = watch.spikes
    assert (report.batch, report.rates) == (AT + 1, (1e-2, 100.0))
    kinds = nanwatch.Trace.open(watch.trace_path).table(["note"])["note"].to_pylist()
    assert ("spike" in kinds) == (not batches)


def left(*names: str) -> list[Departure]:
    """Return departures of "module label"."""
    return [Departure(*name.split(" ", 1), 64.0, 1.0, 50.0) for name in names]


@pytest.mark.parametrize(
    ("forward", "backward", "jump", "cause", "first"),
    [
        (["rnn input[0]", " input[0]"], [], "loss", "input", "rnn input[0]"),
        (["maker.2 weight", "maker.2 output", "critic input[0]"], [], "loss", "weight", "maker.2 weight"),
        (["layer output", "head weight"], ["head weight.grad"], "loss", "module", "layer output"),
        (["layer attention logits"], [], "loss", "module", "layer attention logits"),
        ([], ["head output.grad", "head weight.grad"], "gradients", "gradient", "head output.grad"),
        ([], ["head output.grad"], "loss", "loss", None),
    ],
)
def test_cause_is_the_first_signal_that_left_its_history(forward, backward, jump, cause, first):
    kind, shown = cause_of(left(f" {jump}"), left(*forward), left(*backward), None)
    assert (kind, None if shown is None else f"{shown.module} {shown.label}") == (cause, first)


def test_nothing_of_the_graph_is_kept() -> None:
    net = model()
    optimizer = torch.optim.AdamW(net.parameters())
    with watching.watch(net, spikes=True, rerun=False) as watch:
        x = torch.randn(4, 6)
        output = net(x)
        loss = output.sum()
        watch.note_loss(loss)
        loss.backward()
        kept = [weakref.ref(tensor) for tensor in (loss, output, x)]
        optimizer.step()
        del loss, output, x
        assert [reference() for reference in kept] == [None, None, None]
