"""Time of a step of vLLM, watched by the plugin and unwatched, in turns in one process.

    NANWATCH=1 OMP_NUM_THREADS=1 python benchmarks/bench_vllm.py [--hidden 1024] [--layers 12] [--rounds 15]
    NANWATCH=1 OMP_NUM_THREADS=1 python benchmarks/bench_vllm.py --model qwen3 --layers 28 --vocabulary 151936

Needs vLLM (`make test-vllm` makes an environment with it) and nanwatch installed there. The second line has the shape
of Qwen3-0.6B. Eight requests decode; the median of the rounds' ratios is what watching costs, in wall time and in CPU
time of this process, in which the model runs. Other programs disturb the wall time more.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=("llama", "qwen3"), default="llama")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=24)
    options = parser.parse_args()
    from vllm import LLM, SamplingParams

    heads = options.hidden // 64
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": options.hidden,
        "intermediate_size": 3 * options.hidden, "num_hidden_layers": options.layers, "num_attention_heads": heads,
        "num_key_value_heads": heads, "vocab_size": options.vocabulary,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    if options.model == "qwen3":
        config |= {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128,
            "num_key_value_heads": heads // 2, "tie_word_embeddings": True,
        }  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config))
        engine = LLM(
            folder, load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, dtype="float32", seed=0,
            max_model_len=128, max_num_seqs=8, kv_cache_memory_bytes=256 << 20, enable_prefix_caching=False,
        )  # fmt: skip
    prompts = [{"prompt_token_ids": [(17 * i + 5 * j) % 250 + 3 for j in range(16)]} for i in range(8)]
    asked = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True, detokenize=False)
    worker = engine.llm_engine.model_executor.driver_worker.worker
    watched = type(worker).execute_model
    if not hasattr(worker, "nanwatch_report"):
        raise SystemExit(
            "vLLM did not start nanwatch's plugin. Set NANWATCH=1, and install nanwatch into vLLM's environment,"
            " because vLLM finds the plugin by its entry point: pip install --no-build-isolation ."
        )

    def run(step: object) -> tuple[float, float]:
        """Return the wall time and the CPU time of a token."""
        worker.execute_model = step.__get__(worker)  # type: ignore[attr-defined]
        if step is not watched:
            worker._nanwatch.stop()
            worker._nanwatch._model = lambda: None
        begun, cpu = time.perf_counter(), time.process_time()
        engine.generate(prompts, asked, use_tqdm=False)
        return (time.perf_counter() - begun) / options.tokens, (time.process_time() - cpu) / options.tokens

    for step in (watched, watched.__wrapped__):
        run(step)
    pairs = []
    for number in range(options.rounds):
        order = (watched, watched.__wrapped__)[:: 1 if number % 2 else -1]
        times = {step: run(step) for step in order}
        pairs.append((times[watched], times[watched.__wrapped__]))
    for number, name in enumerate(("wall time", "CPU time")):
        ratios = sorted(on[number] / off[number] for on, off in pairs)
        off = statistics.median(off[number] for _, off in pairs)
        print(
            f"{name} of a step {off * 1e3:.2f} ms, watched {100 * (statistics.median(ratios) - 1):+.1f} % (median of"
            f" {options.rounds} rounds, from {100 * (ratios[0] - 1):+.1f} to {100 * (ratios[-1] - 1):+.1f} %)"
        )


if __name__ == "__main__":
    main()
