"""A quantized weight that is not finite is named, and no cure hides it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nanwatch import NonFiniteError, watch

pytest.importorskip("torchao")
from torchao.quantization import Int8WeightOnlyConfig, quantize_


def test_the_tensor_inside_a_quantized_weight_is_named() -> None:
    """An int8 weight has a scale for each row, and that of one row is nan."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    quantize_(model, Int8WeightOnlyConfig())
    with watch(model), pytest.raises(NonFiniteError) as error:
        model(torch.ones(2, 64))
    finding = error.value.report.finding
    assert finding is not None
    assert (finding.module, finding.label, finding.origin) == ("0", "weight.scale", "weight")
    assert not finding.cures
