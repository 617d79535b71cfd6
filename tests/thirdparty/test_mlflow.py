"""The sink `mlflow`: the real package with a store of files, read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from nanwatch.sinks.thread import _finish_all
from support.toys import Scale
from support.watching import watch


def test_numbers_and_words_are_those_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the process has begun; its own metrics stay."""
    mlflow: Any = pytest.importorskip("mlflow", reason="needs MLflow: pip install mlflow-skinny")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    model = nn.Sequential(Scale(2.0))
    with mlflow.start_run() as run, watch(model, sinks="mlflow", log_every=1, on_nonfinite="record"):
        mlflow.log_metric("loss", 1.0)
        model(torch.ones(2, dtype=torch.float16))
        model[0].factor = float("inf")
        model(torch.ones(2))
    _finish_all()
    data = mlflow.get_run(run.info.run_id).data
    assert data.metrics["loss"] == 1.0
    assert data.metrics["nanwatch_headroom_bits/0"] == pytest.approx(15.0, abs=0.01)
    assert data.metrics["nanwatch/is_finite"] == 0.0
    assert data.tags["nanwatch/finding"].startswith("inf first seen in `output` of 0 (Scale)")
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "nanwatch/is_finite")
    assert [(one.step, one.value) for one in history] == [(0, 1.0), (1, 0.0)]
