"""A bad checkpoint that transformers or Lightning saves goes beside the good one."""

from pathlib import Path

import pytest
import torch
from torch import nn

import nanwatch


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_pretrained_model_keeps_its_folder(tmp_path: Path) -> None:
    """The whole folder, of which transformers deletes the old files before it saves."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=20, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    with nanwatch.watch(model, guard_checkpoints=True, black_box=False, rerun=False):
        model.save_pretrained(tmp_path / "model")
        good = files(tmp_path)
        model.transformer.h[0].mlp.c_fc.weight.data[0, 0] = torch.nan
        with pytest.raises(nanwatch.NonFiniteError, match="nonfinite"):
            model.save_pretrained(tmp_path / "model")
    after = files(tmp_path)
    assert {name: after[name] for name in good} == good
    assert {name.split("/")[0] for name in after} == {"model", "model.nonfinite"}


@pytest.mark.slow
def test_lightning_keeps_its_checkpoint(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    module, place = lightning.LightningModule(), tmp_path / "x.ckpt"
    module.layer = nn.Linear(2, 2)
    trainer = lightning.Trainer(logger=False, accelerator="cpu", default_root_dir=tmp_path)
    trainer.strategy.connect(module)
    with nanwatch.watch(module, guard_checkpoints=True, black_box=False, rerun=False):
        trainer.save_checkpoint(place, weights_only=True)
        good = place.read_bytes()
        module.layer.weight.data[0] = torch.nan
        with pytest.raises(nanwatch.NonFiniteError):
            trainer.save_checkpoint(place, weights_only=True)
        trainer.strategy.remove_checkpoint(place)  # as its callback does with the checkpoint before
    assert place.read_bytes() == good
    assert {path.name for path in tmp_path.glob("*.ckpt")} == {"x.ckpt", "x.nonfinite.ckpt"}
