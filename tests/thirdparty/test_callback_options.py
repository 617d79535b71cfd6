"""The callbacks of transformers' Trainer and of Lightning take the options of `watch`, and hand over the scaler."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nanwatch


@pytest.mark.parametrize("package", ["transformers", "lightning"])
def test_a_callback_has_the_options_of_a_watch(package: str, tmp_path: Path) -> None:
    """The options of its watch are those of `watch` with the same arguments, with the scaler of the trainer."""
    pytest.importorskip(package)
    given: dict[str, Any] = {
        "read": "weights outputs",
        "gradients": True,
        "modules": ("0", "(root)"),
        "every": 2,
        "on_nonfinite": "record",
        "output_dir": tmp_path,
        "audit": nanwatch.Audit(7, frozen="0"),
    }
    callback = import_module(f"nanwatch.integrations.{package}").NanWatchCallback(**given)
    scaler = torch.amp.GradScaler("cpu")
    started = callback.start(nn.Sequential(nn.Linear(2, 2)), scaler)
    expected = nanwatch.watch(nn.Sequential(nn.Linear(2, 2)), **given)
    ours, theirs = vars(started._options), vars(expected._options)
    assert {name for name in ours if ours[name] != theirs[name]} == {"scaler", "sinks"}
    assert ours["scaler"] is scaler
    callback.stop()
    expected.stop()
    with pytest.raises(TypeError, match="watch has no option"):
        type(callback)(include="0")
