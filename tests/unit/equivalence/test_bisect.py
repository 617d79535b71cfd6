"""`nanwatch.bisect` over settings: which one changes the numbers, by how much, and what is put back."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import nanwatch

SETTINGS = ["autocast", "tf32", "sdpa", "fastpath", "mkldnn", "threads"]


class Attention(nn.Module):
    """Attention over its input, by the kernel that PyTorch chooses, and its argument by name."""

    def forward(self, x: torch.Tensor, *, scale: float) -> torch.Tensor:
        return nn.functional.scaled_dot_product_attention(x, x, x) * scale


def settings() -> list[Any]:
    return [
        torch.is_autocast_enabled("cpu"),
        torch.get_float32_matmul_precision(),
        torch.backends.mha.get_fastpath_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch.get_num_threads(),
        torch.backends.cuda.flash_sdp_enabled(),
        torch.backends.cudnn.allow_tf32,
    ]


@pytest.mark.parametrize("switches", [SETTINGS, SETTINGS[::-1]])
def test_a_setting_is_named(switches: list[str]) -> None:
    """The only one of six above the noise floor, wherever it was named; settings are put back."""
    before = settings()
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 4))
    x = torch.randn(8, 16)
    found = nanwatch.bisect(model, x, switches=switches)
    assert found.changed_by == "torch.autocast('cpu', torch.bfloat16)"
    assert found.runs <= 6  # log2(6) + 3
    assert found.reference == "float64"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        made = model(x).double()
    exact = model.double()(x.double()).detach()
    assert found.error == pytest.approx(float((made - exact).abs().max() / exact.abs().max()))
    assert found.floor < 1e-5
    assert settings() == before


def test_settings_that_are_on_are_the_default() -> None:
    """autocast is a switch where it is on."""
    model = nn.Linear(16, 16)
    words = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            # Without the compilation of modules, which is a switch by default.
            words.append(nanwatch.bisect(model, torch.randn(4, 16), backend="eager").changed_by)
    assert words == ["", "torch.autocast('cpu', torch.bfloat16)"]


def test_rounding_counts_where_every_bit_does() -> None:
    """The fused kernel of attention rounds in another way, which is no change but by its bits."""
    x = torch.randn(2, 4, 64, 32)
    inputs = {"x": x, "scale": 0.5}
    assert nanwatch.bisect(Attention(), inputs, switches=["sdpa"]).equal
    found = nanwatch.bisect(Attention(), inputs, switches=["sdpa"], exact=True)
    assert found.changed_by.startswith("fused attention kernels")
    assert (found.reference, found.runs) == ("bits", 2)
    assert 0 < found.error < 1e-5


def test_random_numbers_are_alike_in_each_run() -> None:
    """Dropout in training is no difference; its other numbers in float64 are told, and statistics stay."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout())
    state = {name: x.clone() for name, x in model.state_dict().items()}
    x, random_state = torch.randn(16, 8), torch.get_rng_state()
    found = nanwatch.bisect(model, x, switches=["fastpath"], loss=True)
    assert found.equal, found.to_text()
    torch.testing.assert_close(dict(model.state_dict()), state, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.training
    assert all(one.grad is None for one in model.parameters())


def test_the_document_has_what_the_text_has() -> None:
    """JSON for programs."""
    model = nn.Linear(16, 16)
    found = nanwatch.bisect(model, (torch.randn(4, 16),), switches=["autocast"])
    document = json.loads(found.to_json())
    assert document["equal"] is False
    assert document["label"] == "output"
    assert document["error"] == found.error
    assert found.to_text().startswith(
        "Changed by: torch.autocast('cpu', torch.bfloat16) (1 switch, 3 runs)\n"
    )


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"model": 3, "inputs": 1}, TypeError, "should be a torch.nn.Module, got int"),
        ({"model": nn.Identity(), "inputs": 1, "switches": ["flash"]}, ValueError, "no switch 'flash'.*sdpa"),
        ({"model": nn.Linear(2, 2), "inputs": torch.ones(3)}, RuntimeError, "size mismatch|shapes cannot"),
    ],
)
def test_bad_use(arguments: dict[str, Any], error: type[Exception], words: str) -> None:
    """The error says what came and what is accepted; an error of the model itself is the caller's."""
    with pytest.raises(error, match=words):
        nanwatch.bisect(**arguments)
