"""The plugin in vLLM, which starts it by its entry point: a tiny Llama with random weights serves eight requests.

vLLM pins a torch of its own: `make test-vllm` runs this in an environment of its own. Elsewhere it is skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import nanwatch

pytest.importorskip("vllm")
if not entry_points(group="vllm.general_plugins", name="nanwatch"):
    pytest.skip("nanwatch is not installed here, but imported from its folder", allow_module_level=True)

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256,
    "max_position_embeddings": 256, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "rope_theta": 10000.0,
}  # fmt: skip
# The fourth of eight prompts has the token 255 as its sixth, whose rows become nan in the second of three layers.
SERVE = """
import json
import sys

from vllm import LLM, SamplingParams

engine = LLM(
    "model", load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, dtype="float32", seed=0,
    max_model_len=128, max_num_seqs=8, kv_cache_memory_bytes=64 << 20, enable_prefix_caching=False,
)

def plant(model):
    rows = {}
    model.model.embed_tokens.register_forward_pre_hook(lambda module, args: rows.update(bad=args[0] == 255))
    model.model.layers[1].mlp.act_fn.register_forward_hook(
        lambda module, args, output: output.masked_fill(rows["bad"][:, None], float("nan"))
    )

engine.apply_model(plant)
prompts = [[(17 * i + 5 * j) % 250 + 3 for j in range(11)] for i in range(8)]
prompts[3][5] = 255
asked = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, detokenize=False)
outputs = engine.generate([{"prompt_token_ids": one} for one in prompts], asked)
served = {"tokens": [list(one.outputs[0].token_ids) for one in outputs]}
if sys.argv[1] == "watched":
    from prometheus_client import REGISTRY

    served["watch"] = engine.collective_rpc("nanwatch_report")[0]
    served["count"] = REGISTRY.get_sample_value("nanwatch_bad_requests_total", {"phase": "prefill"})
with open(sys.argv[1], "w") as file:
    json.dump(served, file)
"""


@pytest.mark.slow
def test_the_request_of_a_nan_is_named_and_no_token_is_another(tmp_path: Path) -> None:
    """One of eight, in its prefill, at its sixth token; counted once, though it decodes five more tokens."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "serve.py").write_text(SERVE)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("NANWATCH")}
    clean |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    clean |= {"OMP_NUM_THREADS": "1"}
    served: dict[str, Any] = {}
    for name, switch in (("unwatched", ""), ("watched", "1")):
        line, env = [sys.executable, "serve.py", name], clean | {"NANWATCH": switch}
        subprocess.run(line, cwd=tmp_path, env=env, check=True, timeout=300)
        served[name] = json.loads((tmp_path / name).read_text())
    assert served["watched"]["tokens"] == served["unwatched"]["tokens"]
    watch = served["watched"]["watch"]
    [bad] = watch["requests"]
    assert bad["request"].split("-")[0] == "3"
    assert (bad["phase"], bad["position"], bad["module"]) == ("prefill", 5, "model.layers.1.mlp.act_fn")
    assert isinstance(bad["block"], int)
    finding = nanwatch.Report.from_json(watch["report"]).finding
    assert (finding.module, finding.origin) == ("model.layers.1.mlp.act_fn", "produced")
    assert any(bad["request"] in remark for remark in finding.remarks)
    assert served["watched"]["count"] == 1
