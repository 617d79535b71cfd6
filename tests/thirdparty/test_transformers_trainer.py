"""transformers' Trainer: the callback, and the class behind `--debug underflow_overflow`."""

from __future__ import annotations

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.integrations import debug

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import Trainer, TrainingArguments  # noqa: E402

from nanwatch.integrations.transformers import HEADROOM, PLACE, NanWatchCallback  # noqa: E402
from support.architectures import ARCHITECTURES  # noqa: E402
from support.first_fault import LeastHeadroom, first_fault  # noqa: E402
from support.processes import environment, forked  # noqa: E402


def trainer_of(
    folder: Path, model: nn.Module | None = None, *, callbacks: Any = (), half: bool = False, name: str = "gpt2",
    compute_loss_func: Any = None, **options: Any,
) -> Trainer:  # fmt: skip
    torch.manual_seed(0)
    model = model or ARCHITECTURES[name].build()
    words = torch.randint(2, 64, (32, 5), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in words]
    given = {
        "max_steps": 12, "per_device_train_batch_size": 2, "logging_steps": 3, "save_strategy": "no", "optim": "sgd",
        "max_grad_norm": 0.0, "lr_scheduler_type": "constant", "learning_rate": 1e-3, "use_cpu": True, "report_to": [],
        "disable_tqdm": True, "dataloader_pin_memory": False, "seed": 0,
    }  # fmt: skip
    return Trainer(
        model.half() if half else model, TrainingArguments(str(folder), **given | options), train_dataset=rows,
        eval_dataset=rows[:6], compute_loss_func=compute_loss_func, callbacks=list(callbacks),
    )  # fmt: skip


def weights(trainer: Trainer) -> list[torch.Tensor]:
    return [p.detach().clone() for p in trainer.model.parameters()]


@pytest.mark.parametrize("half", [False, True], ids=["bf16 autocast", "fp16 weights"])
def test_an_overflow_is_found_and_named(half, tmp_path):
    """A learning rate that is too high makes the forward leave the format; the module is the one that hooks find."""
    options: dict[str, Any] = {"name": "t5", "half": True} if half else {"name": "gpt2", "bf16": True}
    options["learning_rate"] = 30.0 if half else 1000.0
    plain = trainer_of(tmp_path, **options)
    expected = first_fault(plain.model, plain.train)
    callback = NanWatchCallback()
    trainer = trainer_of(tmp_path, callbacks=[callback], **options)
    with pytest.raises(nanwatch.NonFiniteError) as error:
        trainer.train()
    finding = error.value.report.finding
    assert (finding.module, finding.label, finding.origin) == (expected, "output", "produced")
    assert finding.operation is not None
    assert callback.watch.report() is error.value.report


def test_accumulation_and_evaluation_count_as_batches(tmp_path):
    """Each forward is a batch, also of an evaluation; weights end bit-equal to an unwatched training's."""
    options: dict[str, Any] = {
        "gradient_accumulation_steps": 2, "eval_strategy": "steps", "eval_steps": 4, "per_device_eval_batch_size": 2,
        "max_steps": 8, "bf16": True, "max_grad_norm": 1.0,
    }  # fmt: skip
    plain = trainer_of(tmp_path, **options)
    plain.train()
    callback = NanWatchCallback(on_nonfinite="record", gradients=True)
    watched = trainer_of(tmp_path, callbacks=[callback], **options)
    watched.train()
    assert all(torch.equal(a, b) for a, b in zip(weights(plain), weights(watched), strict=True))
    assert callback.watch.batch == 8 * 2 + 2 * 3 - 1
    assert callback.watch.skipped_steps == ()
    assert all(module._compiled_call_impl is None for module in watched.model.modules())


class _Weighted(Trainer):
    """Computes a loss that is no output of its model."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return 100 * loss if self.state.global_step == 50 else loss


@pytest.mark.parametrize("is_subclass", [False, True])
def test_spike_is_told_with_the_loss_of_the_trainer(is_subclass, tmp_path):
    """The model itself returns no loss, or a usual one. The weights are the same."""
    calls = []

    def of_user(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        calls.append(0)
        logits = outputs.logits.flatten(0, 1)
        return (100.0 if len(calls) == 51 else 1.0) * nn.functional.cross_entropy(logits, labels.flatten())

    def trained(*callbacks: Any) -> Trainer:
        calls.clear()
        function = None if is_subclass else of_user
        options = {"compute_loss_func": function, "max_steps": 52, "learning_rate": 1e-5}
        trainer = trainer_of(tmp_path, callbacks=callbacks, **options)
        if is_subclass:
            trainer.__class__ = _Weighted
        trainer.train()
        return trainer

    callback = NanWatchCallback(spikes=True)
    with pytest.warns(RuntimeWarning, match="spike in batch 50: loss"):
        watched = trained(callback)
    (spike,) = callback.watch.spikes
    (jump,) = [departure for departure in spike.jumps if departure.label == "loss"]
    assert jump.value / jump.usual == pytest.approx(100, rel=0.3)
    assert spike.cause == "loss"
    assert all(map(torch.equal, weights(watched), weights(trained())))


def _of_ignored_labels(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    counted = (labels > 1000).float()
    return (outputs.logits.square().mean(-1) * counted).sum() / counted.sum()  # here


def test_a_loss_function_of_the_user(tmp_path):
    """Trainer has deleted the batch by the time of the backward. The line is the user's, and a patch of it works."""
    callback = NanWatchCallback(gradients=True)
    trainer = trainer_of(tmp_path, callbacks=[callback], compute_loss_func=_of_ignored_labels)
    with pytest.raises(nanwatch.NonFiniteError) as error:
        trainer.train()
    finding = error.value.report.finding
    lines = Path(__file__).read_text().splitlines()
    (line,) = (number for number, text in enumerate(lines, 1) if text.endswith("# here"))
    assert (finding.operation, finding.source) == ("aten.div.Tensor", f"{__file__}:{line}")
    assert finding.cures[0].works
    assert finding.cures[0].patch.count("\n+") == 2  # the new line, and the head


class _Oracle(transformers.TrainerCallback):
    """The least headroom between two logs."""

    def __init__(self, model: nn.Module) -> None:
        self.least, self.logged = LeastHeadroom(model), []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        # The callback's own entry causes a log too.
        if HEADROOM not in logs and self.least.bits < inf:
            self.logged.append(self.least.take())


def test_the_least_headroom_of_each_interval_is_logged(tmp_path):
    """`nanwatch/headroom_bits` is what torch finds in all weights and outputs since the last log, with its module."""
    model = ARCHITECTURES["gpt2"].build()
    options: dict[str, Any] = {
        "bf16": True, "learning_rate": 3.0, "gradient_accumulation_steps": 2, "eval_strategy": "steps",
        "eval_steps": 4, "max_steps": 7,
    }  # fmt: skip
    trainer = trainer_of(tmp_path, model, callbacks=[NanWatchCallback(on_nonfinite="record")], **options)
    oracle = _Oracle(model)
    trainer.add_callback(oracle)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if HEADROOM in entry]
    assert [entry[HEADROOM] for entry in entries] == pytest.approx(oracle.logged, abs=1e-9)
    assert len(entries) >= 3
    names = {name for name, _ in model.named_modules()}
    assert all(entry[PLACE].split()[0] in names | {"the"} for entry in entries)
    json.loads(json.dumps(trainer.state.log_history))


def test_patching_twice_and_undoing():
    """To patch twice is to patch once; undone, Trainer has its own class; debug_utils always has."""
    trainer_module, theirs = transformers.trainer, transformers.debug_utils.DebugUnderflowOverflow
    assert trainer_module.DebugUnderflowOverflow is theirs
    for _ in range(2):
        debug.patch_transformers()
        assert issubclass(trainer_module.DebugUnderflowOverflow, nanwatch.DebugUnderflowOverflow)
        assert transformers.debug_utils.DebugUnderflowOverflow is theirs
    for _ in range(2):
        debug.unpatch_transformers()
        assert trainer_module.DebugUnderflowOverflow is theirs


FRESH = """
import sys, {imports}
before = "transformers.trainer" in sys.modules
import transformers.trainer as trainer
print(before, trainer.DebugUnderflowOverflow.__module__)
from nanwatch.integrations import debug; debug.unpatch_transformers()
print(trainer.DebugUnderflowOverflow.__module__)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imports", "switch", "expected"),
    [
        ("nanwatch", "", "transformers.debug_utils"),
        ("nanwatch", "0", "transformers.debug_utils"),
        ("nanwatch", "1", "nanwatch.integrations.debug"),
        ("nanwatch.integrations.transformers", "", "transformers.debug_utils"),
    ],
)
def test_the_ways_to_patch_in_a_fresh_process(imports, switch, expected):
    """The import of nanwatch patches nothing; the switch does, before Trainer is there."""
    changed = environment(OMP_NUM_THREADS="1", NANWATCH_TRANSFORMERS=switch)
    done = forked("-c", FRESH.format(imports=imports), env=changed, imported=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == [f"False {expected}", "transformers.debug_utils"]
