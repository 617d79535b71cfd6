"""check="async" under Trainer, Lightning and Accelerate, over a device whose rows never come by themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import nanwatch
from nanwatch.numerics import _extension
from nanwatch.report.report import NonFiniteError
from support.stand_in_device import stand_in
from support.toys import Plant

pytestmark = [
    pytest.mark.skipif(_extension.C is None, reason="the Python recorder waits for each row"),
    pytest.mark.filterwarnings("ignore"),
]
BAD = 3  # the batch with the fault, and the number of good steps before it
INF = float("inf")


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), Plant(**{f"b{BAD}": INF}), nn.Linear(8, 1))


def data() -> TensorDataset:
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, x.sum(1, keepdim=True))


def with_trainer(folder: Path, steps: int, watched: bool) -> list[Tensor]:
    """transformers' Trainer with its callback."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from nanwatch.integrations.transformers import NanWatchCallback

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = model_of()

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": functional.mse_loss(self.parts(x), labels)}

    model = Model()
    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", max_steps=steps, seed=0,
        per_device_train_batch_size=4, learning_rate=0.01, lr_scheduler_type="constant",
        dataloader_pin_memory=False,
    )  # fmt: skip
    rows = [{"x": x, "labels": y} for x, y in data()]
    callbacks = [NanWatchCallback(check="async", rerun=False)] if watched else []
    train(transformers.Trainer(model, args, train_dataset=rows, callbacks=callbacks).train, watched)
    return list(model.parameters())


def with_lightning(folder: Path, steps: int, watched: bool) -> list[Tensor]:
    """Lightning's Trainer, which makes forward and backward in a closure of the optimizer's step."""
    lightning = pytest.importorskip("lightning.pytorch")
    from nanwatch.integrations.lightning import NanWatchCallback

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.parts = model_of()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return functional.mse_loss(self.parts(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    module = Module()
    callbacks = [NanWatchCallback(check="async", rerun=False)] if watched else []
    trainer = lightning.Trainer(
        default_root_dir=folder, accelerator="cpu", logger=False, enable_checkpointing=False, max_steps=steps,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
    )  # fmt: skip
    train(lambda: trainer.fit(module, DataLoader(data(), batch_size=4)), watched)
    return list(module.parameters())


def with_accelerate(folder: Path, steps: int, watched: bool) -> list[Tensor]:
    """A loop around what Accelerate has prepared."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    plain = model_of()
    model, optimizer, loader = accelerator.prepare(
        plain, torch.optim.AdamW(plain.parameters(), lr=0.01), DataLoader(data(), batch_size=4)
    )

    def loop() -> None:
        with nanwatch.watch(model, check="async", rerun=False, enabled=watched):
            for _, (x, y) in zip(range(steps), loader, strict=False):
                optimizer.zero_grad()
                accelerator.backward(functional.mse_loss(model(x), y))
                optimizer.step()

    train(loop, watched)
    return list(plain.parameters())


def train(run: Callable[[], object], watched: bool) -> None:
    """Run it; watched, it is to end by the fault."""
    if not watched:
        run()
        return
    with pytest.raises(NonFiniteError) as error:
        run()
    finding = error.value.report.finding
    assert finding is not None
    assert (finding.batch, finding.class_name, finding.phase) == (BAD, "Plant", "forward")


@pytest.mark.parametrize("train_with", [with_trainer, with_lightning, with_accelerate])
def test_the_step_that_would_take_a_late_fault_is_not_made(
    train_with: Callable[[Path, int, bool], list[Tensor]], tmp_path: Path
) -> None:
    """The weights are, bit for bit, those of an unwatched training that ended before the bad batch."""
    with stand_in():
        stopped = train_with(tmp_path / "watched", BAD + 3, True)
    expected = train_with(tmp_path / "plain", BAD, False)
    assert all(torch.equal(x, y) for x, y in zip(stopped, expected, strict=True))
    assert all(x.isfinite().all() for x in stopped)
