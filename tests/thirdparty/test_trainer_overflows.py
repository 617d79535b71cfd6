"""An overflow that nobody planted, in the forward and in the backward, under autocast in each of the trainers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import nanwatch
from support.first_backward_fault import first_backward_fault
from support.first_fault import first_fault
from support.training import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore")
STEPS = 12


class Net(nn.Module):
    """A residual network of two layers, without bounds on what it computes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(4, 8)
        self.act = nn.ReLU()
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


class Case(NamedTuple):
    """A training that overflows, and why it does."""

    precision: str
    square: bool
    lr: float
    scale: float = 1.0

    def loss(self, output: Tensor) -> Tensor:
        """Return the mean distance to 3, or the mean of its square."""
        distance = (output.float() - 3).abs()
        return (distance.square() if self.square else distance).mean()


# The gradient of the mean distance does not grow with the outputs: on its way back it is multiplied by one weight less
# than the inputs on theirs, and the forward leaves the format first. That of the mean square is as large as the
# outputs, and is multiplied once more: there the backward is first, and a loss scale adds to it. It is with learning
# rates from 16 to 39 in bf16 and from 12 to 74 in fp16; with others a step goes past the backward's overflow at once.
CASES = {
    ("forward", "bf16"): Case("bf16", square=False, lr=1000.0),
    ("forward", "fp16"): Case("fp16", square=False, lr=30.0),
    ("backward", "bf16"): Case("bf16", square=True, lr=25.0),
    ("backward", "fp16"): Case("fp16", square=True, lr=30.0, scale=256.0),
}


def data() -> Tensor:
    return torch.randn(16, 4, generator=torch.Generator().manual_seed(0))


def transformers_trainer(model: nn.Module, case: Case, folder: Path, **watched: Any) -> None:
    """Trainer, which leaves fp16 alone on a CPU: the autocast is put where Trainer says that one's own belongs."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    callback = import_module("nanwatch.integrations.transformers").NanWatchCallback

    class Half(transformers.Trainer):
        def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> Any:
            return torch.autocast("cpu", torch.float16, cache_enabled=bool(cache_enabled))

    args = transformers.TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, dataloader_pin_memory=False, seed=0,
        max_steps=STEPS, per_device_train_batch_size=16, save_strategy="no", optim="sgd", lr_scheduler_type="constant",
        learning_rate=case.lr / case.scale, max_grad_norm=0.0, bf16=case.precision == "bf16",
        label_names=["labels"],
    )  # fmt: skip
    (transformers.Trainer if args.bf16 else Half)(
        model,
        args,
        train_dataset=[{"x": row, "labels": 3.0} for row in data()],
        compute_loss_func=lambda output, labels, num_items_in_batch: case.loss(output) * case.scale,
        callbacks=[callback(**watched)] if watched else [],
    ).train()


def lightning_trainer(model: nn.Module, case: Case, folder: Path, **watched: Any) -> None:
    """Lightning's Trainer, which takes bf16 for "16-mixed" on a CPU unless its plugin is given as such."""
    lightning = pytest.importorskip("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    callback = import_module("nanwatch.integrations.lightning").NanWatchCallback
    plugins = []
    if case.precision == "fp16":
        mixed = import_module("lightning.pytorch.plugins.precision").MixedPrecision
        plugins = [mixed("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=case.scale))]

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return case.loss(self.net(batch[0]))

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=case.lr)

    lightning.Trainer(
        default_root_dir=folder, max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, plugins=plugins,
        precision=None if plugins else "bf16-mixed", callbacks=[callback(**watched)] if watched else [],
    ).fit(Module(), DataLoader(TensorDataset(data()), batch_size=16))  # fmt: skip


def accelerate_loop(model: nn.Module, case: Case, folder: Path, **watched: Any) -> None:
    """Accelerate, which has no fp16 on a CPU: the autocast is the loop's own."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(
        cpu=True, mixed_precision="no" if case.precision == "fp16" else case.precision
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=case.lr / case.scale)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    if watched:
        nanwatch.watch(prepared, **watched)
    for _ in range(STEPS):
        with torch.autocast("cpu", torch.float16, enabled=case.precision == "fp16"):
            output = prepared(data())
        accelerator.backward(case.loss(output) * case.scale)
        optimizer.step()
        optimizer.zero_grad()


TRAINERS = [transformers_trainer, lightning_trainer, accelerate_loop]
Train = Callable[..., None]


def failure(train: Train, case: Case, folder: Path, **options: Any) -> tuple[nanwatch.Report, Net]:
    """The report of the error that ends the watched training, and the model as it was left."""
    model = Net()
    with pytest.raises(nanwatch.NonFiniteError) as error:
        train(model, case, folder, **options)
    return error.value.report, model


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("train", TRAINERS)
def test_an_overflow_of_the_forward_is_found_and_named(train: Train, precision: str, tmp_path: Path) -> None:
    """A learning rate that is too high: weights grow until the product of two layers leaves the format."""
    case = CASES["forward", precision]
    plain = Net()
    expected = first_fault(plain, lambda: train(plain, case, tmp_path))
    report, model = failure(train, case, tmp_path, gradients=True)
    finding = report.finding
    assert finding is not None
    assert finding.module.removeprefix("net.") == expected
    assert (finding.phase, finding.label, finding.origin) == ("forward", "output", "produced")
    assert finding.value == "inf"
    assert finding.operation == "aten.addmm.default"
    assert (finding.source or "").startswith(__file__)
    assert_same_bits(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("train", TRAINERS)
def test_an_overflow_of_the_backward_is_found_and_named(train: Train, precision: str, tmp_path: Path) -> None:
    """A mean square whose learning rate, and in fp16 whose loss scale, is too high: all outputs are finite, and the
    gradient, as large as the output, leaves the format when it is multiplied by a weight or an activation. The weights
    are those that an unwatched training has before the step that would take it.
    """
    case = CASES["backward", precision]
    plain = Net()
    expected = first_backward_fault(plain, lambda: train(plain, case, tmp_path))
    # Lightning's GradScaler would skip the step: here no step may be.
    report, model = failure(train, case, tmp_path, gradients=True, max_skipped_steps=0)
    finding = report.finding
    assert finding is not None
    assert finding.module.removeprefix("net.") == expected.module
    assert (finding.phase, finding.origin) == ("backward", "produced")
    # The operands of addmm(bias, input, weight) that have gradients.
    assert finding.label in [("bias.grad", "input[0].grad", "weight.grad")[i] for i in expected.results]
    assert (finding.value, finding.batch) == ("inf", expected.batch)
    assert finding.operation == expected.operation
    assert (finding.source or "").startswith(__file__)
    assert_same_bits(model.state_dict(), plain.state_dict())
    text = report.to_text()
    assert f"By:    {expected.operation} at {finding.source}" in text
    assert f"Next:  {'bfloat16' if precision == 'bf16' else 'float16'} ends at" in text
