"""`nanwatch compare --engine vllm` with a real vLLM, in processes of their own; `make test-vllm` runs it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import nanwatch
from nanwatch.cli.equivalence import compare_main
from nanwatch.integrations.run_request import EngineError

pytest.importorskip("vllm")
transformers: Any = pytest.importorskip("transformers")
# 40 tokens in common are more than a block of the prefix cache.
PROMPTS = [[*range(3, 43), *range(10 + i, 60, 7)] for i in range(3)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Llama of two layers; in `synced` a key projection of the second is another one."""
    os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1"}
    folder = tmp_path_factory.mktemp("engine")
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        vocab_size=128,
        max_position_embeddings=128,
        **heads,
    )
    torch.manual_seed(0)
    found = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for x in found.parameters():
            x.copy_(
                x + 0.2 * torch.randn(x.shape) if x.ndim == 1 else torch.randn(x.shape) * x.shape[-1] ** -0.5
            )
        found.save_pretrained(folder / "model")
        found.model.layers[1].self_attn.k_proj.weight[:, 3] += 0.1
    found.save_pretrained(folder / "synced")
    return folder


@pytest.mark.slow
def test_chunks_and_a_prefix_cache_compute_what_training_computes(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command line. The fused projections are compared, and sampled tokens have no gap."""
    (tmp_path / "prompts.txt").write_text("\n".join(map(str, PROMPTS)))
    given = ["--engine", "vllm", str(model / "model"), str(tmp_path / "prompts.txt"), "--json", "--option"]
    given += [
        "enable_prefix_caching=true",
        "block_size=32",
        "max_num_batched_tokens=40",
        "--html",
        str(tmp_path / "page.html"),
    ]
    status = compare_main(given)
    found = json.loads(capsys.readouterr().out)
    assert status == 0, found["comparison"]
    names = {one["module_a"] for one in found["comparison"]["modules"]}
    attention, gated = "model.layers.1.self_attn", "model.layers.1.mlp"
    assert {", ".join(f"{attention}.{x}_proj" for x in "qkv"), f"{gated}.gate_proj, {gated}.up_proj"} <= names
    assert {"model", "lm_head", ""} <= names
    assert any("from its prefix cache" in one for one in found["remarks"])
    assert found["gap"]["tokens"] == 24
    assert found["gap"]["largest"] < 1e-4
    assert "Error over depth" in (tmp_path / "page.html").read_text()


@pytest.mark.slow
def test_a_stale_part_of_a_fused_weight_is_named(model: Path) -> None:
    """By its outputs and by its bits."""
    found = nanwatch.compare_engine(
        model / "model", PROMPTS, engine_python=sys.executable, engine_model=model / "synced", max_tokens=2
    )
    assert found.first is not None, found.to_text()
    assert found.first.module_b == "model.layers.1.self_attn.qkv_proj"
    assert "in model.layers.1.self_attn.k_proj only" in found.comparison.likely
    assert found.stale == ("model.layers.1.self_attn.qkv_proj.weight (part 1 of 3)",)


@pytest.mark.slow
def test_a_model_that_vllm_refuses_is_an_error_with_the_versions(model: Path, tmp_path: Path) -> None:
    """Here for an option that it does not know."""
    with pytest.raises(EngineError, match=r"vllm 0\..*nonsense.*tried with vllm 0\.32\.0"):
        nanwatch.compare_engine(model / "model", PROMPTS, options={"nonsense": 1})
