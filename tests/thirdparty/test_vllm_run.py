"""`nanwatch compare --engine vllm` with a real vLLM, in processes of their own; `make test-vllm` runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import nanwatch
from nanwatch.cli.equivalence import compare_main
from nanwatch.integrations.engine_compare import EngineError
from nanwatch.integrations.vllm_run import stale_weights
from support.paths import SCRIPTS

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
    """It says which architecture."""
    config = json.loads((model / "model/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["FooForCausalLM"]}))
    with pytest.raises(EngineError, match=r"^vllm 0\..*FooForCausalLM.*; tried with vllm 0\.32\.0$"):
        nanwatch.compare_engine(tmp_path, PROMPTS)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_weight_that_a_sync_left_out_is_named_in_a_live_engine(
    dtype: str, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though vLLM has packed it on a CPU. Before the sync all weights are stale, of the fused ones each part."""
    vllm: Any = pytest.importorskip("vllm")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    trainer = transformers.AutoModelForCausalLM.from_pretrained(model / "model", dtype=torch.float32)
    sizes = {"max_model_len": 64, "kv_cache_memory_bytes": 1 << 26, "skip_tokenizer_init": True}
    engine = vllm.LLM(str(model / "model"), dtype=dtype, enforce_eager=True, **sizes)
    assert stale_weights(trainer, engine) == []
    old = {name: x.clone() for name, x in trainer.state_dict().items()}
    with torch.no_grad():
        for x in trainer.parameters():
            x.mul_(1.5)
    assert "model.layers.0.mlp.gate_up_proj.weight (part 0, 1 of 2)" in stale_weights(trainer, engine)
    left_out = "model.layers.1.self_attn.k_proj.weight"
    synced = [(name, old[name] if name == left_out else x) for name, x in trainer.state_dict().items()]
    engine.collective_rpc("reload_weights", kwargs={"weights_iterator": synced})
    assert stale_weights(trainer, engine) == ["model.layers.1.self_attn.qkv_proj.weight (part 1 of 3)"]


@pytest.mark.slow
def test_grpo_logs_its_gap_and_names_the_stale_weight_at_a_jump(tmp_path: Path) -> None:
    """The gap is the one that TRL measures. Synced weights are not stale, though the optimizer changes them after."""
    pytest.importorskip("trl")
    command = [sys.executable, str(SCRIPTS / "grpo_with_vllm.py"), "6", "6"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.strip().rpartition("\n")[2])
    assert len(found["gaps"]) == 3
    assert all(ours == pytest.approx(trls, rel=1e-4) for ours, trls in found["gaps"])
    [told] = found["told"]
    assert told.startswith("nanwatch: step 6: the gap to vLLM jumps")
    assert told.endswith("; stale in vLLM: model.layers.1.post_attention_layernorm.weight")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "against"),
    [
        ({"enforce_eager": False}, {"enforce_eager": True}),
        ({"enable_prefix_caching": True, "block_size": 32}, {"enable_prefix_caching": False}),
        ({"max_num_seqs": 8}, {"max_num_seqs": 1}),
        ({"max_num_batched_tokens": 40}, {"max_num_batched_tokens": 2048}),
    ],
)
def test_two_settings_of_vllm_compute_the_same(
    options: dict[str, Any], against: dict[str, Any], model: Path
) -> None:
    """And the setting is told. A compiled model has its root and its logits alone."""
    own = {"enable_prefix_caching": False, **options}
    found = nanwatch.compare_engine(model / "model", PROMPTS, options=own, against=against, max_tokens=3)
    assert found.equal is True, found.to_text()
    assert any(one.startswith(next(iter(against))) for one in found.settings)
    is_compiled, is_cached = "enforce_eager" in against, "block_size" in options
    assert (len(found.comparison.modules) < 4) is is_compiled
    assert any("B took" in one for one in found.remarks) is is_cached
