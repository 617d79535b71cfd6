"""`nanwatch.compare_engine` with transformers on both sides: as a trainer, and as an engine with its cache."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import nanwatch
from nanwatch.equivalence.recorded_run import RecordedRun
from nanwatch.integrations import engine_compare, run_request
from nanwatch.integrations.run_request import EngineError, RunRequest

transformers: Any = pytest.importorskip("transformers")
PROMPTS = [[3, 14, 15, 9, 2, 6], [5, 3, 5, 8]]


@pytest.fixture
def model(tmp_path: Path) -> Any:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": False}
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        vocab_size=64,
        max_position_embeddings=64,
        **heads,
    )
    torch.manual_seed(0)
    found = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for x in found.parameters():
            x.copy_(
                x + 0.2 * torch.randn(x.shape) if x.ndim == 1 else torch.randn(x.shape) * x.shape[-1] ** -0.5
            )
    found.save_pretrained(tmp_path / "model")
    return found


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Make the runs without processes of their own, through the same files."""

    def made(requests: Sequence[RunRequest], _: str) -> list[RecordedRun]:
        torch.save(requests, tmp_path / "requests")
        assert run_request.main(str(tmp_path)) == 0
        found: list[RecordedRun] = torch.load(tmp_path / "runs", weights_only=False)
        return found

    monkeypatch.setattr(engine_compare, "recorded_runs", made)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("in_process", "model")
def test_decode_with_a_cache_computes_what_training_computes(dtype: str, tmp_path: Path) -> None:
    """All modules and logits of prefill and decode are compared; sampled tokens weigh the same."""
    found = nanwatch.compare_engine(tmp_path / "model", PROMPTS, "transformers", dtype=dtype, max_tokens=4)
    assert found.equal is True, found.to_text()
    assert {"", "lm_head", "model.layers.1.self_attn.q_proj"} <= {
        one.module_a for one in found.comparison.modules
    }
    assert found.gap is not None
    assert found.gap.tokens == 8
    assert found.settings == found.stale == ()


@pytest.mark.usefixtures("in_process")
def test_a_weight_that_was_not_synced_is_named(model: Any, tmp_path: Path) -> None:
    """As the first module, and by its name."""
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3] += 0.01
    model.save_pretrained(tmp_path / "synced")
    found = nanwatch.compare_engine(
        tmp_path / "model", PROMPTS, "transformers", engine_model=tmp_path / "synced", max_tokens=2
    )
    assert found.first is not None
    assert found.first.module_a == "model.layers.1.mlp.up_proj"
    assert found.stale == ("model.layers.1.mlp.up_proj.weight",)


@pytest.mark.usefixtures("in_process", "model")
def test_two_settings_of_one_engine(tmp_path: Path) -> None:
    """Eager attention and SDPA compute the same."""
    settings = {"options": {"attn_implementation": "sdpa"}, "against": {"attn_implementation": "eager"}}
    found = nanwatch.compare_engine(tmp_path / "model", PROMPTS, "transformers", max_tokens=2, **settings)
    assert found.equal is True, found.to_text()


@pytest.mark.usefixtures("in_process")
def test_a_soft_cap_that_the_trainer_drops_is_told(tmp_path: Path) -> None:
    """Transformers before 5.24 runs SDPA without; since then it refuses SDPA for Gemma 2."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "vocab_size": 64,
        "head_dim": 16,
    }
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "attn_logit_softcapping": 0.5}
    torch.manual_seed(0)
    found = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, **heads, initializer_range=0.3))
    found.save_pretrained(tmp_path / "model")
    eager = {"attn_implementation": "eager"}
    drops: dict[str, Any] = {**eager, "attn_logit_softcapping": None}
    if transformers.Gemma2PreTrainedModel._supports_sdpa:
        drops = {"attn_implementation": "sdpa"}
    own = {"options": eager, "trainer_options": drops, "max_tokens": 1}
    said = nanwatch.compare_engine(tmp_path / "model", PROMPTS, "transformers", **own)
    assert said.first is not None
    assert said.first.module_a == "model.layers.0.self_attn"
    assert "attn_logit_softcapping is None in A and 0.5 in B" in said.comparison.likely


@pytest.mark.slow
@pytest.mark.usefixtures("model")
def test_each_side_is_a_process_of_its_own(tmp_path: Path) -> None:
    """Text is tokenized by the tokenizer of the folder."""
    tokenizers: Any = pytest.importorskip("tokenizers")
    words = {word: i for i, word in enumerate(["[UNK]", "to", "be", "or", "not", "that"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]")
    fast.save_pretrained(tmp_path / "model")
    found = nanwatch.compare_engine(
        tmp_path / "model", ["to be or not to be", [7, 8]], "transformers", max_tokens=2
    )
    assert found.equal is True, found.to_text()
    assert found.gap is not None
    assert found.gap.tokens == 4


def refused(engine: str, tmp_path: Path) -> str:
    torch.save([RunRequest(engine, "model", "float32", [[5]])], tmp_path / "requests")
    assert run_request.main(str(tmp_path)) == 1
    return (tmp_path / "error").read_text()


def test_an_engine_that_is_absent_says_how_to_name_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The versions tried are told with each error."""
    monkeypatch.setitem(sys.modules, "vllm", None)
    assert "--engine-python" in refused("vllm", tmp_path)


def test_an_engine_that_refuses_or_is_another_one_says_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that died has its last line."""
    assert "ended in python: killed" in run_request.ended("python", "…\nkilled\n")
    absent = "python: … (ModuleNotFoundError: No module named 'nanwatch')"
    assert "install it there too" in run_request.ended("python", absent)
    other = ModuleType("vllm")
    other.__version__ = "0.19.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", other)
    why = refused("vllm", tmp_path)
    assert why.startswith("vllm 0.19.1 does not run model: ModuleNotFoundError: ")
    assert "does not run model: OSError" in refused("transformers", tmp_path)


@pytest.mark.usefixtures("model")
def test_an_environment_that_fails_is_told_with_the_versions_tried(tmp_path: Path) -> None:
    """An interpreter that does not exist, and one that ends."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho Illegal instruction >&2\nexit 132\n")
    python.chmod(0o755)
    with pytest.raises(EngineError, match=r"ended in .*: Illegal instruction; tried with vllm 0\.32\.0"):
        nanwatch.compare_engine(tmp_path / "model", PROMPTS, engine_python=str(python))
    with pytest.raises(EngineError, match="does not start"):
        nanwatch.compare_engine(tmp_path / "model", PROMPTS, engine_python=str(tmp_path / "none"))


@pytest.mark.usefixtures("in_process", "model")
def test_a_version_that_was_not_tried_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is compared as others are."""
    monkeypatch.setitem(run_request.TRIED, "transformers", ("3.0",))
    found = nanwatch.compare_engine(tmp_path / "model", PROMPTS, "transformers", max_tokens=1)
    assert found.equal is True
    assert any("was tried with 3.0" in one for one in found.remarks)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"engine": "tgi"}, "engine should be one of vllm, transformers"),
        ({"model": "nowhere"}, "should be a folder"),
        ({"prompts": []}, "none of them empty"),
        ({"prompts": "text"}, "list of texts"),
        ({"dtype": "int8"}, "dtype should be"),
        ({"max_tokens": 0}, "at least 1"),
    ],
)
@pytest.mark.usefixtures("model")
def test_arguments_that_make_no_sense(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Each is an error before a process starts."""
    given = {"model": tmp_path / "model", "prompts": PROMPTS, **change}
    with pytest.raises(ValueError, match=words):
        nanwatch.compare_engine(**given)
