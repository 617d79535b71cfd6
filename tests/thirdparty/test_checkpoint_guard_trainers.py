"""Checkpoints of transformers, its Trainer and Lightning under `guard_checkpoints`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import nanwatch

pytestmark = pytest.mark.filterwarnings("ignore")
QUIET = {"guard_checkpoints": True, "rerun": False, "black_box": False}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def language_model() -> Any:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=64, n_positions=32)
    return transformers.GPT2LMHeadModel(config)


@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_no_shard_of_a_pretrained_model_is_replaced(tmp_path, policy):
    model = language_model()
    place = tmp_path / "model"
    with nanwatch.watch(model, on_nonfinite=policy, **QUIET):
        model.save_pretrained(place, max_shard_size="5KB")
        good = files(tmp_path)
        assert len([name for name in good if name.endswith(".safetensors")]) > 1
        model.transformer.wpe.weight.data[3, 0] = torch.inf
        if policy == "raise":
            with pytest.raises(nanwatch.NonFiniteError, match=r"wpe\.weight"):
                model.save_pretrained(place)
        else:
            model.save_pretrained(place)
    after = files(tmp_path)
    assert {name: after[name] for name in good} == good
    assert "model.nonfinite/model.safetensors" in after


class Planter:
    """Writes a nan or an inf where a third step has been."""

    def __init__(self, what: str) -> None:
        self.what = what

    def plant(self, weight: nn.Parameter, optimizer: Any) -> None:
        if self.what == "weight":
            weight.data[-1].fill_(torch.nan)
        else:
            optimizer.state[weight]["exp_avg"][-1].fill_(torch.inf)


def train_with_transformers(folder: Path, what: str, policy: str) -> None:
    transformers = pytest.importorskip("transformers")
    model, planter = language_model(), Planter(what)

    class Plants(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
            if state.global_step == 3:
                planter.plant(model.transformer.wpe.weight, optimizer)

    watching = import_module("nanwatch.integrations.transformers").NanWatchCallback
    tokens = torch.arange(8)
    arguments = transformers.TrainingArguments(
        str(folder),
        max_steps=3,
        save_steps=1,
        save_total_limit=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=[{"input_ids": tokens, "labels": tokens}] * 32,
        callbacks=[Plants(), watching(on_nonfinite=policy, **QUIET)],
    ).train()


def train_with_lightning(folder: Path, what: str, policy: str) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    planter = Planter(what)

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.inner(batch[0]).square().mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    class Plants(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            if trainer.global_step == 3:
                planter.plant(module.inner.weight, trainer.optimizers[0])

    watching = import_module("nanwatch.integrations.lightning").NanWatchCallback
    saves = lightning.callbacks.ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=1, save_top_k=1, monitor="step", mode="max"
    )
    lightning.Trainer(
        max_steps=3, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=[Plants(), watching(on_nonfinite=policy, **QUIET), saves],
    ).fit(Module(), DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4))  # fmt: skip


TRAINERS: dict[str, tuple[Callable[[Path, str, str], None], str]] = {
    "transformers": (train_with_transformers, "checkpoint-2/model.safetensors"),
    "lightning": (train_with_lightning, "step=2.ckpt"),
}


@pytest.mark.slow
@pytest.mark.parametrize("trainer", TRAINERS)
@pytest.mark.parametrize("what", ["weight", "state"])
@pytest.mark.parametrize("policy", ["raise", "warn"])
def test_a_trainer_keeps_its_last_good_checkpoint(tmp_path, trainer, what, policy):
    """Also where it would delete it, as the bad one is its successor."""
    train, good = TRAINERS[trainer]
    if policy == "raise":
        with pytest.raises(nanwatch.NonFiniteError, match=r"\(checkpoint\)"):
            train(tmp_path, what, policy)
    else:
        train(tmp_path, what, policy)
    found = files(tmp_path)
    assert good in found
    assert any(".nonfinite" in name for name in found)
    assert not {"checkpoint-3/model.safetensors", "step=3.ckpt"} & set(found) or what == "state"
    assert not {"checkpoint-3/optimizer.pt", "step=3.ckpt"} & set(found) or what == "weight"
