"""The callbacks of transformers' Trainer and of Lightning: every option of `watch` is theirs, and reaches the watch."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nanwatch.session.api import watch
from nanwatch.session.options import Options
from nanwatch.sinks.sink import Sink

# A value other than the default for each option; what is not among them is the test's to add.
GIVEN: dict[str, Any] = {
    "max_frames": 7, "on_nonfinite": "record", "check": "batch", "weights": False, "buffers": False, "inputs": False,
    "outputs": True, "gradients": True, "counts": True, "fingerprints": True, "attention": 7, "max_skipped_steps": 3,
    "include": "0", "sketches": 3, "statistics": 5, "spikes": True, "sinks": (Sink(), print),
    "exclude": "1",
    "allow_inf": "0", "allow_nan": "0",
    "every": 2, "trace_batches": (1,), "log_every": 9, "abort_after_batch": 4,
    "forecast": False, "rerun": False, "peer_timeout": 1.5, "black_box": False, "stall_timeout": 9.0,
    "enabled": False, "guard_checkpoints": True, "replicas": 3,
    "updates": 4, "frozen": "0",
}  # fmt: skip
# What has no effect without another option.
NEEDS: dict[str, dict[str, Any]] = {
    "exclude": {"include": "*"}, "scaler": {"gradients": True}, "max_skipped_steps": {"gradients": True},
    "log_every": {"sinks": print}, "frozen": {"updates": True},
}  # fmt: skip
# Objects, which have to be made, and what needs an extra or a folder.
MADE = ("scaler", "optimizer", "trace", "output_dir")


def names() -> set[str]:
    """The options of `watch`."""
    parameters = inspect.signature(watch).parameters.values()
    return {one.name for one in parameters if one.kind is one.KEYWORD_ONLY and not one.name.startswith("_")}


def values(model: nn.Module, folder: Path) -> dict[str, Any]:
    """One for each option."""
    optimizer = torch.optim.SGD(model.parameters())
    return GIVEN | {
        "scaler": torch.amp.GradScaler("cpu"),
        "optimizer": optimizer,
        "output_dir": folder / "reports",
        "trace": folder / "trace",
    }


def test_no_option_is_forgotten_here() -> None:
    """An option that is new has a value in the table above."""
    assert names() == {*GIVEN, *MADE}
    defaults = inspect.signature(watch).parameters
    assert all(value != defaults[name].default for name, value in GIVEN.items() if name != "outputs")


@pytest.mark.parametrize("package", ["transformers", "lightning"])
def test_a_callback_takes_every_option(package: str, tmp_path: Path) -> None:
    """The options of its watch are, one by one, those of `watch` with the same arguments."""
    pytest.importorskip(package)
    callback_class = import_module(f"nanwatch.integrations.{package}").NanWatchCallback
    for name in sorted(names()):
        if name in ("trace", "sketches"):
            pytest.importorskip("pyarrow")
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        value = values(model, tmp_path)[name]
        needed = {"trace": tmp_path / "sketched"} if name == "sketches" else NEEDS.get(name, {})
        given = {name: value, **needed}
        callback = callback_class(**given)
        started = callback._deferred.start(model)
        expected = watch(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), **given)
        try:
            for field in Options.__dataclass_fields__:
                ours, theirs = getattr(started._options, field), getattr(expected._options, field)
                assert ours == theirs, (name, field)
        finally:
            callback.stop()
            expected.stop()
