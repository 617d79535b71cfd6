"""Trains a tiny Llama with TRL's GRPO and vLLM in this process: `grpo_with_vllm.py STEPS [STALE_FROM]`.

The syncs from step STALE_FROM on leave a weight of layer 1 wrong. The script prints, as JSON, the gaps that the
callback logs beside TRL's own, and what it warns of.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

from datasets import Dataset
from datasets.table import InMemoryTable
from pyarrow import table
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from nanwatch.integrations.trl import EngineGapCallback

STEPS, STALE_FROM = (*map(int, sys.argv[1:]), 1 << 30)[:2]
OURS, TRLS = "nanwatch/gap_mean", "sampling/sampling_logp_difference/mean"


def main() -> None:
    folder = tempfile.mkdtemp()
    inner = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    inner.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="w0", pad_token="w1", eos_token="w2"
    )
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=64, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    args = GRPOConfig(
        "out", max_steps=STEPS, per_device_train_batch_size=4, num_generations=4, use_cpu=True, bf16=False,
        report_to=[], seed=0, save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
        max_completion_length=6, logging_steps=1, use_vllm=True, vllm_mode="colocate", vllm_max_model_length=32,
        vllm_gpu_memory_utilization=0.1,
    )  # fmt: skip
    prompts = [f"w{i} w{2 * i} w{3 * i} w7" for i in range(3, 20)]
    trainer = GRPOTrainer(
        AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=lambda completions, **rest: [float(len(text) % 5) for text in completions],
        args=args,
        # With a fingerprint, because the one of datasets pickles what is not importable beside vLLM.
        train_dataset=Dataset(InMemoryTable(table({"prompt": prompts})), fingerprint="prompts"),
        processing_class=tokenizer,
    )
    generation: Any = trainer.vllm_generation
    sync = generation.sync_weights

    def plant(model: Any) -> None:
        model.model.layers[1].post_attention_layernorm.weight.data[3:9] += 8

    def synced() -> None:
        sync()
        if trainer.state.global_step + 1 >= STALE_FROM:
            generation.llm.apply_model(plant)

    generation.sync_weights = synced
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("nanwatch.trl").addHandler(handler)
    trainer.add_callback(EngineGapCallback(trainer, every=2, compare=False))
    trainer.train()
    gaps = [[entry[OURS], entry[TRLS]] for entry in trainer.state.log_history if OURS in entry]
    print(json.dumps({"gaps": gaps, "told": told}))  # noqa: T201


if __name__ == "__main__":
    main()
