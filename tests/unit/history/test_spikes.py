"""watching.watch(spikes=True): what it gathers, what it tells, and that it harms nothing."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.history.spikes import cause_of
from nanwatch.recording.recorder import PythonRecorder
from nanwatch.report.spike import Departure, SpikeReport
from support import watching

AT, STEPS = 60, 64


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))


def train(
    net: nn.Module,
    watch: nanwatch.Watch,
    *,
    at: int = AT,
    steps: int = STEPS,
    scale: bool = False,
    **spoils: Any,
) -> list[float]:
    """Return the losses. In step `at` one target is 1000, or the weight named in `spoils` is 50 times as large."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", enabled=scale, growth_interval=40)
    losses = []
    for step in range(steps):
        drawn = torch.Generator().manual_seed(step)
        x = torch.randn(32, 6, generator=drawn)
        y = x.sum(1, keepdim=True) + 0.5 * torch.randn(32, 1, generator=drawn)
        if step == at and not spoils:
            y[5] = 1000.0
        for name in spoils if step == at else ():
            with torch.no_grad():
                net.get_parameter(name.replace("_", ".")).mul_(spoils[name])
        optimizer.zero_grad()
        loss = (net(x) - y).square().flatten()
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
    (found,) = watch.spikes
    assert (found.batch, found.cause, found.shares[0][0]) == (AT, "loss", 5)
    assert found.shares[0][1] > 0.99
    folder = tmp_path / f"spike-batch-{AT}"
    assert SpikeReport.from_json((folder / "report.json").read_text()) == found
    assert [Path(one).name for one in found.files] == ["capsule", "report.html", "report.json", "report.txt"]
    assert found.headline in (folder / "report.txt").read_text()
    assert "<polyline" in (folder / "report.html").read_text()
    # The capsule has the weights from before the step, so its replay gives the output of that batch.
    capsule = nanwatch.Capsule.open(folder / "capsule")
    assert torch.equal(capsule.args[0], torch.randn(32, 6, generator=torch.Generator().manual_seed(AT)))
    assert nanwatch.replay(folder / "capsule", model()).finding is None


def test_training_computes_the_same() -> None:
    """The oracle is a run without a watch, spike included."""
    bare, watched = model(), model()
    with watching.watch(bare, enabled=False) as watch:
        losses = train(bare, watch)
    with watching.watch(watched, spikes=True) as watch, pytest.warns(RuntimeWarning):
        assert train(watched, watch) == losses
    assert all(map(torch.equal, bare.parameters(), watched.parameters()))


@pytest.mark.filterwarnings("error")
def test_evaluation_is_no_part_of_the_histories() -> None:
    net = model()
    with watching.watch(net, spikes=True) as watch:
        for _ in range(5):
            train(net, watch, at=-1, steps=16)
            with torch.no_grad():
                net(1000 * torch.randn(4, 6))
    assert watch.spikes == ()


def test_learning_rate_that_jumps_is_named() -> None:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)

    def train_with_a_jump(watch: nanwatch.Watch) -> None:
        for step in range(STEPS):
            drawn = torch.Generator().manual_seed(step)
            x = torch.randn(32, 6, generator=drawn)
            optimizer.param_groups[0]["lr"] = 100.0 if step == AT else 1e-3
            loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
            watch.note_loss(loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    with nanwatch.watch(net, spikes=True) as watch, pytest.warns(RuntimeWarning, match="learning rate"):
        train_with_a_jump(watch)
    (report,) = watch.spikes
    assert (report.batch, report.rates) == (AT + 1, (1e-3, 100.0))


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
def test_cause_is_the_first_signal_that_left_its_history(
    forward: list[str], backward: list[str], jump: str, cause: str, first: str | None
) -> None:
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
        kept = [weakref.ref(one) for one in (loss, output, x)]
        optimizer.step()
        del loss, output, x
        assert [one() for one in kept] == [None, None, None]


def test_both_recorders_gather_the_same_gradients() -> None:
    """The oracle is autograd: the largest magnitude of each weight's gradient."""

    def peaks(watch: nanwatch.Watch, net: nn.Module) -> list[tuple[tuple[str, str, str], float]]:
        watch._recorder.gathers_gradient_peaks = True
        for seed in (0, 1):  # what came since it was last taken
            drawn = torch.Generator().manual_seed(seed)
            net(torch.randn(8, 6, generator=drawn)).square().mean().backward()
        batch, names, values = watch._recorder.take_gradient_peaks()
        assert batch == 1
        assert watch._recorder.take_gradient_peaks()[:2] == (-1, [])
        return list(
            zip(names, torch.frombuffer(bytearray(values), dtype=torch.float64).tolist(), strict=True)
        )

    net = model()
    with watching.watch(net, gradients=True) as watch:
        found = dict(peaks(watch, net))
    expected: dict[str, Tensor] = {}
    for seed in (0, 1):
        net.zero_grad()
        net(torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
        for name, x in net.named_parameters():
            assert x.grad is not None
            expected[name] = torch.maximum(expected.get(name, torch.zeros(())), x.grad.abs().max())
    for name, largest in expected.items():
        module, _, label = name.rpartition(".")
        assert found[module, f"{label}.grad", "float32"] == largest.item()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nanwatch.numerics._extension.C", None)
        other = model()
        with watching.watch(other, gradients=True) as watch:
            assert isinstance(watch._recorder, PythonRecorder)
            assert dict(peaks(watch, other)) == found
