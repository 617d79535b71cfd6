"""Lightning's Trainer, of both packages, with the callback."""

from __future__ import annotations

import csv
import logging
import sys
from importlib import import_module
from math import log2
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import nanwatch
from support.first_fault import LeastHeadroom, first_fault

pytest.importorskip("lightning")
from nanwatch.integrations.lightning import NanWatchCallback

pytestmark = pytest.mark.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def module_of(package: str, lr: float) -> Any:
    """A LightningModule whose training_step calls two parts and computes in between."""

    class Module(import_module(package).LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
            self.head = nn.Linear(8, 1)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            return functional.l1_loss(self.head(self.encoder(x.to(self.dtype))).float(), y)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.head(self.encoder(batch[0].to(self.dtype)))

        test_step = validation_step

        def predict_step(self, batch: Any) -> Any:
            return self.head(self.encoder(batch[0].to(self.dtype)))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=lr)

    torch.manual_seed(0)
    return Module()


def loader() -> Any:
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)


def trainer_of(package: str, folder: Path, *callbacks: Any, **options: Any) -> Any:
    given = {"max_epochs": 5, "accelerator": "cpu", "logger": False, "log_every_n_steps": 3}
    return import_module(package).Trainer(
        default_root_dir=folder, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=list(callbacks), **given | options,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("package", "precision", "lr"), [(PACKAGES[0], "bf16-mixed", 1e3), (PACKAGES[1], "16-true", 30.0)]
)
def test_an_overflow_is_found_and_named(package, precision, lr, tmp_path):
    """A learning rate that is too high makes the forward leave the format; the module is the one that hooks find."""
    pytest.importorskip(package)
    plain, trainer = module_of(package, lr), trainer_of(package, tmp_path, precision=precision)
    expected = first_fault(plain, lambda: trainer.fit(plain, loader()))
    module, callback = module_of(package, lr), NanWatchCallback()
    with pytest.raises(nanwatch.NonFiniteError) as error:
        trainer_of(package, tmp_path, callback, precision=precision).fit(module, loader())
    finding = error.value.report.finding
    assert (finding.module, finding.label, finding.origin) == (expected, "output", "produced")
    assert callback.watch.report() is error.value.report
    # Lightning calls no teardown after an exception.
    assert all(part._compiled_call_impl is None for part in module.modules())
    if sys.version_info >= (3, 11):
        batch = finding.batch // 2  # encoder and head are a batch each
        (note,) = error.value.__notes__
        assert note == f"Lightning was at epoch {batch // 4}, global step {batch}, batch_idx {batch % 4}."


def test_a_watched_training_ends_bit_equal(tmp_path):
    """Accumulation, validation within fit and the sanity check change nothing, and all their calls are batches."""
    options: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2, "num_sanity_val_steps": 1}
    plain, watched, callback = module_of(PACKAGES[0], 0.1), module_of(PACKAGES[0], 0.1), NanWatchCallback()
    trainer_of(PACKAGES[0], tmp_path, **options).fit(plain, loader(), loader())
    trainer_of(PACKAGES[0], tmp_path, callback, **options).fit(watched, loader(), loader())
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    assert callback.watch.batch == 2 * (1 + 2 * (4 + 4)) - 1
    assert all(part._compiled_call_impl is None for part in watched.modules())


def test_steps_that_the_scaler_skips_are_counted(tmp_path):
    """The gradient of its head's weight, 2^24 times as large, leaves float16 until the scale has come down: skipped
    steps, as many as the scaler skips unwatched, with its scales though there is another one, and the same weights.
    """

    def fit(module: Any, *callbacks: Any) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
        plugin = import_module(f"{PACKAGES[0]}.plugins.precision").MixedPrecision("16-mixed", "cpu", scaler)
        trainer_of(PACKAGES[0], tmp_path, *callbacks, plugins=[plugin]).fit(module, loader())
        return scaler.get_scale()

    plain, watched = module_of(PACKAGES[0], 0.01), module_of(PACKAGES[0], 0.01)
    callback = NanWatchCallback(gradients=True)
    scale = fit(plain)
    assert fit(watched, callback) == scale
    skipped = round(24 - log2(scale))
    assert skipped > 2
    assert len(callback.watch.skipped_steps) == skipped
    assert str(callback.watch.skipped_steps[0]) == "skipped step (scale 16777216 → 8388608)"
    assert callback.watch.report().finding is None
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))


@pytest.mark.parametrize("stage", ["validate", "predict"])
def test_every_stage_is_watched(stage, tmp_path):
    """A run without training is watched from its start to its end."""
    module, callback = module_of(PACKAGES[0], 0.1), NanWatchCallback()
    getattr(trainer_of(PACKAGES[0], tmp_path, callback), stage)(module, loader())
    assert callback.watch.batch == 2 * 4 - 1
    assert all(part._compiled_call_impl is None for part in module.modules())
    with torch.no_grad():
        module.head.weight.fill_(3e38)
    with pytest.raises(nanwatch.NonFiniteError, match="head"):
        getattr(trainer_of(PACKAGES[0], tmp_path, callback), stage)(module, loader())


def test_the_least_headroom_of_each_interval_is_logged(tmp_path):
    """The loggers get the least headroom that torch finds in all weights and outputs since the last time."""
    module, logged = module_of(PACKAGES[0], 0.5), []
    least = LeastHeadroom(module)

    class Oracle(import_module(PACKAGES[0]).Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
            if trainer.global_step in (3, 6, 8):
                logged.append(least.take())

    logger = import_module("lightning.pytorch.loggers").CSVLogger(tmp_path)
    callback = NanWatchCallback(on_nonfinite="record")
    trainer_of(PACKAGES[0], tmp_path, callback, Oracle(), logger=logger, max_epochs=2).fit(module, loader())
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = [(int(row["step"]), float(row["nanwatch/headroom_bits"])) for row in csv.DictReader(file)]
    assert [step for step, _ in rows] == [3, 6, 8]
    assert [bits for _, bits in rows] == pytest.approx(logged, abs=1e-9)
    assert callback.least.bits == rows[-1][1]
    assert callback.least.module in dict(module.named_modules())
