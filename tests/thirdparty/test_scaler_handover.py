"""A GradScaler of a trainer: the steps that it skips are counted with its scales, and too many in a row are an error.

Trainer and Accelerate make one for float16 on an accelerator, and none on a CPU: there the tests put it where
Accelerate would have it, with all that follows from it.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nanwatch
from support.training import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 30


class Net(nn.Module):
    """Under float16 autocast a gradient leaves the format with a loss scale of 65536, and none with 32768."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.act, self.down = nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)
        nn.init.constant_(self.down.weight, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


def loss_of(output: Tensor) -> Tensor:
    return 0.125 * (output.float() - 3).abs().sum() / len(output)


def data() -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(0))


class Run(NamedTuple):
    """Results of a training: the scale after each step, the weights, and the Watch, if any."""

    scales: list[float]
    weights: dict[str, Tensor]
    watch: Any


class Noting(torch.amp.GradScaler):
    """Notes the scale after each update: the oracle for what is skipped."""

    def __init__(self, init_scale: float) -> None:
        super().__init__("cpu", init_scale=init_scale, growth_interval=10**6)
        self.scales = [init_scale]

    def update(self, new_scale: Any = None) -> None:
        super().update(new_scale)
        self.scales.append(self.get_scale())


def put_scaler(accelerator: Any, scaler: torch.amp.GradScaler) -> None:
    """Set the scaler as Accelerator.__init__ does for "fp16" on an accelerator."""
    assert accelerator.mixed_precision == "fp16"
    assert accelerator.scaler is None
    accelerator.native_amp, accelerator.scaler = True, scaler


def transformers_trainer(
    model: nn.Module, scaler: Noting, folder: Path, options: dict[str, Any], watched: dict[str, Any] | None
) -> Any:
    """Trainer with fp16=True."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class Scaled(transformers.Trainer):  # type: ignore[misc, name-defined]
        def create_accelerator_and_postprocess(self) -> None:
            super().create_accelerator_and_postprocess()
            put_scaler(self.accelerator, scaler)

    given = {"max_grad_norm": 0.0, "optim": "sgd", "learning_rate": 1e-3, "lr_scheduler_type": "constant"}
    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, fp16=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False, seed=0,
        max_steps=STEPS, per_device_train_batch_size=8, save_strategy="no", label_names=["labels"], **given | options,
    )  # fmt: skip
    callbacks = []
    if watched is not None:
        callbacks = [import_module("nanwatch.integrations.transformers").NanWatchCallback(**watched)]
    trainer = Scaled(
        model,
        args,
        train_dataset=[{"x": row, "labels": 3.0} for row in data()],
        compute_loss_func=lambda output, labels, num_items_in_batch: loss_of(output),
        callbacks=callbacks,
    )
    trainer.train()
    return callbacks[0].watch if callbacks else None


def lightning_trainer(
    model: nn.Module, scaler: Noting, folder: Path, options: dict[str, Any], watched: dict[str, Any] | None
) -> Any:
    """Lightning's Trainer with its plugin for "16-mixed"."""
    lightning = pytest.importorskip("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return loss_of(self.net(batch[0]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    callbacks = []
    if watched is not None:
        callbacks = [import_module("nanwatch.integrations.lightning").NanWatchCallback(**watched)]
    plugin = import_module("lightning.pytorch.plugins.precision").MixedPrecision("16-mixed", "cpu", scaler)
    lightning.Trainer(
        default_root_dir=folder, max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, plugins=[plugin], callbacks=callbacks, **options,
    ).fit(Module(), DataLoader(TensorDataset(data()), batch_size=8))  # fmt: skip
    return callbacks[0].watch if callbacks else None


def accelerate_loop(
    model: nn.Module, scaler: Noting, folder: Path, options: dict[str, Any], watched: dict[str, Any] | None
) -> Any:
    """Accelerate with mixed_precision="fp16", and a loop around it."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    options = dict(options)
    clip = options.pop("clip", None)
    fused = options.pop("fused", False)
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="fp16", **options)
    put_scaler(accelerator, scaler)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    watch = None if watched is None else nanwatch.watch(prepared, scaler=accelerator.scaler, **watched)
    batch = -1
    while (
        optimizer.optimizer.state_dict()["state"].get(0, {}).get("step", 0) < STEPS
        and (batch := batch + 1) < 2 * STEPS
    ):
        with accelerator.accumulate(prepared):
            accelerator.backward(loss_of(prepared(data())))
            if clip is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(prepared.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return watch


Train = Callable[..., Any]
WAYS = {
    "Trainer": (transformers_trainer, {}),
    "Trainer, clipped": (transformers_trainer, {"max_grad_norm": 1.0}),
    "Trainer, accumulating": (transformers_trainer, {"gradient_accumulation_steps": 2}),
    "Trainer, fused": (transformers_trainer, {"optim": "adamw_torch_fused"}),
    "Lightning": (lightning_trainer, {}),
    "Lightning, clipped": (lightning_trainer, {"gradient_clip_val": 1.0}),
    "Lightning, accumulating": (lightning_trainer, {"accumulate_grad_batches": 2}),
    "Accelerate": (accelerate_loop, {}),
    "Accelerate, clipped": (accelerate_loop, {"clip": 1.0}),
    "Accelerate, accumulating": (accelerate_loop, {"gradient_accumulation_steps": 2}),
    "Accelerate, fused": (accelerate_loop, {"fused": True}),
}


# The three trainers as they are, and in the slow tests with each option.
EACH_WAY = [
    pytest.param(way, marks=pytest.mark.slow) if options else way for way, (_, options) in WAYS.items()
]


@pytest.fixture(autouse=True)
def _another_scaler() -> Iterator[None]:
    """One that is in use in the same process, so that the trainer's cannot be guessed."""
    gc.collect()
    other = torch.amp.GradScaler("cpu", init_scale=8.0)
    other.scale(torch.ones(1))
    yield
    assert other.get_scale() == 8.0


def run(way: str, folder: Path, init_scale: float, **watched: Any) -> Run:
    """A training that way, watched if there is any option."""
    train, options = WAYS[way]
    model, scaler = Net(), Noting(init_scale)
    watch = train(model, scaler, folder, options, watched or None)
    return Run(scaler.scales, model.state_dict(), watch)


@pytest.mark.parametrize("way", EACH_WAY)
def test_a_step_that_the_scaler_skips_is_counted_and_no_failure(way: str, tmp_path: Path) -> None:
    """With the scale before and after, as often as the scaler's falls; the training is that without a watch."""
    # To accumulate halves the loss in Lightning and Accelerate.
    scale = 2.0**17 if "accumulating" in way else 2.0**16
    plain = run(way, tmp_path, scale)
    ours = run(way, tmp_path, scale, gradients=True, max_frames=10_000)
    assert ours.scales == plain.scales
    falls = [(a, b) for a, b in zip(plain.scales, plain.scales[1:], strict=False) if b < a]
    told = [f"skipped step (scale {a:.0f} → {b:.0f})" for a, b in falls]
    assert [str(one) for one in ours.watch.skipped_steps] == told
    assert ours.watch.counters["skipped_steps"] == len(falls)
    assert told[0] == "skipped step (scale 65536 → 32768)" or "accumulating" in way
    assert len(falls) <= 2 < len(plain.scales)
    assert_same_bits(ours.weights, plain.weights)
    report = ours.watch.report()
    assert report.finding is None
    assert {str(r.note) for frame in ours.watch.frames for r in frame.records if r.isfinite is False} == set(
        told
    )
    assert all(note in report.to_text() for note in told)


@pytest.mark.parametrize(("most", "given"), [(3, {"max_skipped_steps": 3}), (20, {})])
@pytest.mark.parametrize("way", EACH_WAY)
def test_too_many_skipped_steps_in_a_row_are_raised(
    way: str, most: int, given: dict[str, int], tmp_path: Path
) -> None:
    """By the backward after the last that is allowed, with the finding; no weight has changed."""
    train, options = WAYS[way]
    model, scaler = Net(), Noting(2.0**60)
    before = Net().state_dict()
    with pytest.raises(
        nanwatch.NonFiniteError, match=f"the {most} steps before this one were skipped"
    ) as error:
        train(model, scaler, tmp_path, options, {"gradients": True, **given})
    assert scaler.scales == [2.0 ** (60 - i) for i in range(most + 1)]
    finding = error.value.report.finding
    assert finding is not None
    assert finding.phase == "backward"
    assert_same_bits(model.state_dict(), before)


@pytest.mark.parametrize("way", [way for way in WAYS if way.startswith("Accelerate")])
def test_a_step_that_is_made_ends_the_row(way: str, tmp_path: Path) -> None:
    """Row after row of as many skips as are allowed, with steps between them, raises nothing."""
    model, scaler = Net(), Noting(2.0**18)
    plain_update = scaler.update

    def update(new_scale: Any = None) -> None:
        plain_update(2.0**18 if len(scaler.scales) % 5 == 0 else new_scale)

    scaler.update = update  # type: ignore[method-assign]
    train, options = WAYS[way]
    watch = train(model, scaler, tmp_path, options, {"gradients": True, "max_skipped_steps": 3})
    falls = sum(b < a for a, b in zip(scaler.scales, scaler.scales[1:], strict=False))
    assert falls > 6
    assert watch.counters["skipped_steps"] == falls
