"""Small models of transformers and of plain PyTorch for `judge_spikes.py`, with their data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from _spike_training import Batch, Loss, Training
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY, TOKENS, SAMPLES = 32, 12, 16

transformers.logging.set_verbosity_error()


def _sequences(step: int) -> Tensor:
    """Return sequences in which each token follows from the one before."""
    drawn = torch.Generator().manual_seed(step)
    tokens = [torch.randint(0, VOCABULARY, (SAMPLES,), generator=drawn)]
    while len(tokens) < TOKENS:
        tokens.append((5 * tokens[-1] + 3) % VOCABULARY)
    return torch.stack(tokens, dim=1)


def _language(model: nn.Module, **more: Any) -> Training:
    def draw(step: int) -> Batch:
        tokens = _sequences(step)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return _training(model, draw, lambda model, batch: model(**batch).loss, finds_loss=True, **more)


def _training(
    model: nn.Module,
    draw: Callable[[int], Batch],
    loss: Loss,
    *,
    finds_loss: bool = False,
    lr: float = 3e-3,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> Training:
    return Training(model.train(), draw, [(loss, optimizer(model.parameters(), lr=lr))], finds_loss)


_SMALL = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}


def gpt2(**more: Any) -> Training:
    config = transformers.GPT2Config(n_layer=3, n_embd=32, n_head=4, n_positions=TOKENS, **_SMALL)
    return _language(transformers.GPT2LMHeadModel(config), **more)


def llama(**more: Any) -> Training:
    config = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=32, intermediate_size=64, num_attention_heads=4, **_SMALL
    )
    return _language(transformers.LlamaForCausalLM(config), **more)


def qwen2(**more: Any) -> Training:
    config = transformers.Qwen2Config(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        **_SMALL,
    )
    return _language(transformers.Qwen2ForCausalLM(config), **more)


def t5(**more: Any) -> Training:
    config = transformers.T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    return _language(transformers.T5ForConditionalGeneration(config), **more)


def bert(**more: Any) -> Training:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=4,
    )

    def draw(step: int) -> Batch:
        tokens = _sequences(step)
        return {"input_ids": tokens, "labels": tokens[:, 0] % 4}

    model = transformers.BertForSequenceClassification(config)
    return _training(model, draw, lambda model, batch: model(**batch).loss, finds_loss=True, **more)


def _pictures(step: int, noise: float = 1.0) -> tuple[Tensor, Tensor]:
    drawn = torch.Generator().manual_seed(step)
    labels = torch.randint(0, 4, (SAMPLES,), generator=drawn)
    pictures = noise * torch.randn(SAMPLES, 3, 8, 8, generator=drawn)
    for i, label in enumerate(labels.tolist()):
        pictures[i, :, 4 * (label // 2) : 4 * (label // 2) + 4, 4 * (label % 2) : 4 * (label % 2) + 4] += 1
    return pictures, labels


def vit(**more: Any) -> Training:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=8,
        patch_size=2,
        num_labels=4,
    )

    def draw(step: int) -> Batch:
        pictures, labels = _pictures(step, 0.3)
        return {"pixel_values": pictures, "labels": labels}

    model = transformers.ViTForImageClassification(config)
    return _training(model, draw, lambda model, batch: model(**batch).loss, finds_loss=True, **more)


def _of_samples(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def convolutions(**more: Any) -> Training:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16, 4),
    )

    def draw(step: int) -> Batch:
        x, y = _pictures(step)
        return {"x": x, "y": y}

    return _training(model, draw, _of_samples, **more)


def residual(**more: Any) -> Training:
    config = transformers.ResNetConfig(
        num_channels=3,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        num_labels=4,
    )

    def draw(step: int) -> Batch:
        pictures, labels = _pictures(step)
        return {"pixel_values": pictures, "labels": labels}

    model = transformers.ResNetForImageClassification(config)
    return _training(model, draw, lambda model, batch: model(**batch).loss, finds_loss=True, **more)


class _Gated(nn.Module):
    """Two branches, of which a gate closes one."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.second = nn.Linear(32, 32)
        self.branch = nn.Linear(32, 32)
        self.gate = nn.Parameter(torch.ones(()))
        self.last = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.second(x)) + self.branch(x * self.gate))


def regression(**more: Any) -> Training:
    def draw(step: int) -> Batch:
        drawn = torch.Generator().manual_seed(step)
        x = torch.randn(64, 8, generator=drawn)
        return {"x": x, "y": (x[:, :4].sum(1, keepdim=True) + 0.3 * torch.randn(64, 1, generator=drawn))}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch["x"]) - batch["y"]).square().flatten()

    return _training(_Gated(), draw, loss, **more)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 16)
        self.lstm = nn.LSTM(16, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(tokens))[0])


def recurrent(**more: Any) -> Training:
    def draw(step: int) -> Batch:
        return {"x": _sequences(step)}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        tokens = batch["x"]
        return functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return _training(_Recurrent(), draw, loss, **more)
