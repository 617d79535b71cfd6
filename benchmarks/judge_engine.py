"""Judge `nanwatch compare --engine vllm` on planted faults and on pairs that compute the same.

    .venv-vllm/bin/python benchmarks/judge_engine.py [--only WORD] [--wrong] [--json FILE] [--text]

Runs in the environment of `make test-vllm`. Both sides run in this process, one after the other, because vLLM takes
seconds to start. A fault in the model counts as named when the first module is one of the right ones, a fault in a
setting when that setting is told, or for weights when they are stale. A pair that computes the same counts as silent
when it is called equal, with no setting and no weight told. Two settings of vLLM have a fault in B's model that shows
in its setting alone; there no other setting may be told. `--json` replaces the rows of a file that were run again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
sys.path.insert(0, str(Path(__file__).parent))

import torch
import transformers

from nanwatch.equivalence.engine_comparison import EngineComparison
from nanwatch.equivalence.recorded_run import RecordedRun
from nanwatch.integrations import engine_compare, transformers_run, vllm_run
from nanwatch.integrations.run_request import RunRequest

SIZES: dict[str, Any] = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GEMMA = {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32}
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 32, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"num_attention_heads": 2, "tie_word_embeddings": False}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {**GEMMA, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}),
    "gemma3": ("Gemma3", GEMMA),
}
# 70 tokens in common, so that a prefix cache has hits: its blocks are of 32 tokens on a CPU.
PREFIX = [(7 * i) % 240 + 3 for i in range(70)]
PROMPTS = [[*PREFIX, *((17 * i + 5 * j) % 240 + 3 for j in range(9 + 3 * i))] for i in range(8)]
PLAIN = {"enable_prefix_caching": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "prefix cache, chunks": {"enable_prefix_caching": True, "block_size": 32, "max_num_batched_tokens": 48},
    "batch of 1": {**PLAIN, "max_num_seqs": 1},
}
# Options of B, and of A, where both are vLLM.
TWO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "compiled": ({**PLAIN, "enforce_eager": False}, {"enforce_eager": True}),
    "prefix cache": ({"enable_prefix_caching": True, "block_size": 32}, {"enable_prefix_caching": False}),
    "batch of 8": ({**PLAIN, "max_num_seqs": 8}, {"max_num_seqs": 1}),
    "chunks": (
        {**PLAIN, "enable_chunked_prefill": True, "max_num_batched_tokens": 48},
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 2048},
    ),
}


class Case(NamedTuple):
    """Pair of runs. `right` are the modules of A or the settings that may be named, () where both compute the same."""

    name: str
    form: str
    right: tuple[str, ...] = ()
    dtype: str = "float32"
    options: dict[str, Any] = PLAIN
    sampling: dict[str, Any] | None = None
    patch: str = ""
    against: dict[str, Any] | None = None


_L = "model.layers.1"


def _parts(*names: str) -> str:
    return ", ".join(f"{_L}.self_attn.{name}_proj" for name in names)


def _in_model() -> list[Case]:
    def case(form: str, patch: str, *right: str) -> Case:
        return Case(patch.replace("_", " "), form, right, patch=f"_engine_run_faults:{patch}")

    return [
        case("llama", "rotary_base", "model.layers.0.self_attn"),
        case("llama", "eps", f"{_L}.input_layernorm"),
        case("qwen2", "scale", f"{_L}.self_attn"),
        case("gemma2", "softcap", f"{_L}.self_attn"),
        case("gemma2", "final_softcap", "", "lm_head"),
        case("gemma3", "window", f"{_L}.self_attn"),
        case("llama", "gate_and_up", f"{_L}.mlp", f"{_L}.mlp.gate_proj, {_L}.mlp.up_proj"),
        case("llama", "key_and_value", f"{_L}.self_attn", _parts("q", "k", "v"), _parts("q", "v", "k")),
        case("qwen3", "stale_weight", f"{_L}.mlp.down_proj"),
        case("llama", "norm_dtype", f"{_L}.post_attention_layernorm"),
        case("qwen3", "no_query_norm", f"{_L}.self_attn.q_norm"),
        case("gemma2", "embedding_scale", "model", "model.embed_tokens"),
    ]  # fmt: skip


def _in_settings() -> list[Case]:
    def config(form: str, right: str, **change: Any) -> Case:
        return Case(f"config: {right}", form, (right,), options={**PLAIN, "hf_overrides": change})

    rope = {"rope_type": "default", "rope_theta": 5000.0}
    penalty = {"repetition_penalty": 1.5}
    processed = {**PLAIN, "logprobs_mode": "processed_logprobs"}
    return [
        config("llama", "rope_parameters.rope_theta", rope_parameters=rope),
        config("qwen3", "rms_norm_eps", rms_norm_eps=1e-2),
        config("gemma3", "sliding_window", sliding_window=4),
        config("gemma2", "attn_logit_softcapping", attn_logit_softcapping=2.0),
        config("gemma2", "final_logit_softcapping", final_logit_softcapping=3.0),
        Case("engine in bfloat16", "llama", ("dtype",), options={**PLAIN, "dtype": "bfloat16"}),
        config("gemma2", "query_pre_attn_scalar", query_pre_attn_scalar=64),
        Case("temperature in logprobs", "llama", ("temperature",), options=processed, sampling={"temperature": 0.7}),
        Case("penalty in logprobs", "qwen2", ("repetition_penalty",), options=processed, sampling=penalty),
        Case("top-k in logprobs", "qwen3", ("top_k",), options=processed, sampling={"top_k": 5}),
        Case("weights not loaded", "llama", ("stale",), options={**PLAIN, "load_format": "dummy"}),
        Case("weight not synced, no word reads it", "llama", ("stale",), patch="_engine_run_faults:stale_word"),
    ]  # fmt: skip


def _between_settings() -> list[Case]:
    def case(name: str, form: str, dtype: str = "float32", patch: str = "", *right: str) -> Case:
        (options, against), plant = TWO[name], patch and f"_engine_run_faults:{patch}"
        said = f"{patch.replace('_', ' ')} ({name})" if patch else name
        return Case(said, form, right, dtype, options, None, plant, against)

    rotary = "model.layers.0.self_attn.rotary_emb"
    dtypes = ("float32", "bfloat16")
    return [
        *(case("compiled", "llama", dtype) for dtype in dtypes),
        *(case(name, "gemma3", dtype) for name in [*TWO][1:] for dtype in dtypes),
        case("compiled", "llama", "float32", "eps", "", "model"),
        case("prefix cache", "qwen3", "float32", "positions_from_zero", rotary),
        case("batch of 8", "llama", "float32", "rows_of_a_batch", f"{_L}.post_attention_layernorm"),
        case("chunks", "llama", "float32", "positions_from_zero", rotary),
    ]  # fmt: skip


def cases() -> list[Case]:
    """Return all cases: those of a form after each other, because vLLM looks at each class in a process of its own."""
    equal = [
        Case(name, form, (), dtype, options)
        for form in FORMS
        for dtype in ("float32", "bfloat16")
        for name, options in SETTINGS.items()
    ]
    every = [*_in_model(), *_in_settings(), *equal, *_between_settings()]
    return sorted(every, key=lambda one: [*FORMS].index(one.form))


def make(folder: Path, form: str) -> Path:
    """Write the folder of a model with random weights of usual size."""
    name, more = FORMS[form]
    text = "Text" if form == "gemma3" else ""
    config = getattr(transformers, f"{name}{text}Config")(**{**SIZES, **more})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for x in model.parameters():
            noise = torch.randn(x.shape, generator=generator)
            x.copy_(x + 0.2 * noise if x.ndim == 1 else noise * x.shape[-1] ** -0.5)
    model.bfloat16().save_pretrained(folder / form)  # so that both dtypes have the same weights
    return folder / form


def in_process(requests: Sequence[RunRequest], _: str) -> list[RecordedRun]:
    """Make the runs in this process, through the same files."""
    record = (vllm_run if requests[0].engine == "vllm" else transformers_run).record
    with tempfile.TemporaryFile() as file:
        torch.save([*record(requests)], file)
        file.seek(0)
        found: list[RecordedRun] = torch.load(file, weights_only=False)
    return found


def kind_of(case: Case) -> str:
    """Return the kind of a case, under which it is counted."""
    if case.against is not None:
        return "fault between settings" if case.right else "equal settings"
    if not case.right:
        return "equal"
    return "model" if case.patch and "stale" not in case.right else "setting"


def judge(case: Case, found: EngineComparison) -> bool:
    """Return whether a case comes out right."""
    told = [one.split(" is ")[0] for one in found.settings]
    is_meant = not {*told} - {*(case.against or ()), "block_size", "max_num_batched_tokens"}
    if not case.right:
        return found.equal is True and is_meant and not found.stale
    if kind_of(case) == "setting":
        return case.right[0] in told + (["stale"] if found.stale else [])
    is_named = found.equal is False and found.first is not None and found.first.module_a in case.right
    return is_named and (is_meant or case.against is None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--wrong", action="store_true", help="print wrong cases alone")
    parser.add_argument("--text", action="store_true", help="print the whole results")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engine_compare.recorded_runs = in_process
    start, rows = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        for case in cases():
            kind = kind_of(case)
            name = f"{kind} {case.form} {case.dtype}: {case.name}"
            if options.only not in name:
                continue
            place = Path(folder, case.form)
            model = place if place.exists() else make(Path(folder), case.form)
            own = {
                "options": case.options,
                "sampling": case.sampling,
                "patch": case.patch,
                "dtype": case.dtype,
                "against": case.against,
                # SDPA has no soft cap.
                "trainer_options": {"attn_implementation": "eager"} if case.form == "gemma2" else {},
            }
            try:
                found = engine_compare.compare_engine(model, PROMPTS, **own)
                is_right, said = judge(case, found), found.comparison.headline
                said += f" [{'; '.join(found.settings)}] stale {len(found.stale)}; {found.gap}"
            except Exception as error:  # of an engine that refuses: counts as wrong, and is told
                found, is_right, said = None, False, f"{type(error).__name__}: {error}".split("\n")[0]
            rows.append({"case": name, "kind": kind, "dtype": case.dtype, "right": is_right, "said": said})
            if options.json:  # by each case: an engine may end the process
                known = json.loads(options.json.read_text()) if options.json.exists() else []
                made = {row["case"]: row for row in [*known, rows[-1]]}
                options.json.write_text(json.dumps([*made.values()], indent=1) + "\n")
            if not (options.wrong and is_right):
                print(f"{'right' if is_right else 'WRONG'}  {name}: {said}", flush=True)
            if options.text and found is not None:
                print(found.to_text(), flush=True)
    print(f"\n{len(rows)} cases in {time.perf_counter() - start:.0f} s")
    for kind in dict.fromkeys(row["kind"] for row in rows):
        of = [row["right"] for row in rows if row["kind"] == kind]
        print(f"{kind:<22} {sum(of)} of {len(of)} {'silent' if kind.startswith('equal') else 'named'}")


if __name__ == "__main__":
    main()
