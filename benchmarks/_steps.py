"""The models and steps that are timed whole: configurations of real architectures, random seeded weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

Step = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A model and the steps to time on it."""

    name: str
    build: Callable[[], nn.Module]
    steps: dict[str, Callable[[nn.Module], Step]]


# ---- models, from transformers' configurations ----


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config())


def llama_of(width: int, inner: int, layers: int, heads: int, vocabulary: int, **more: int) -> nn.Module:
    """A Llama of these sizes; `more` as LlamaConfig has it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            vocab_size=vocabulary,
            **more,
        )
    )


def llama() -> nn.Module:
    return llama_of(768, 2048, layers=12, heads=12, vocabulary=32000)


def mt5() -> nn.Module:
    from transformers import MT5Config, MT5ForConditionalGeneration

    sizes = {"d_model": 512, "d_kv": 64, "d_ff": 1024, "num_layers": 8, "num_heads": 6}
    return MT5ForConditionalGeneration(MT5Config(vocab_size=32128, feed_forward_proj="gated-gelu", **sizes))


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=1000))


# ---- steps ----


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(5, 30000, (batch, length), generator=torch.Generator().manual_seed(length))


def without_gradients(call: Callable[[nn.Module], object]) -> Callable[[nn.Module], Step]:
    def make(model: nn.Module) -> Step:
        def step() -> object:
            with torch.no_grad():
                return call(model.eval())

        return step

    return make


def causal_forward(length: int) -> Callable[[nn.Module], Step]:
    ids = tokens(1, length)
    return without_gradients(lambda model: model(input_ids=ids, use_cache=False))


def decode(model: nn.Module) -> Step:
    """One token after 64, with a KV cache that is cut back each time."""
    model.eval()
    with torch.no_grad():
        cache = model(input_ids=tokens(1, 64), use_cache=True).past_key_values
    one = tokens(1, 1)

    def step() -> object:
        with torch.no_grad():
            model(input_ids=one, past_key_values=cache, use_cache=True)
        cache.crop(-1)
        return None

    return step


def training(loss: Callable[[nn.Module], torch.Tensor]) -> Callable[[nn.Module], Step]:
    def make(model: nn.Module) -> Step:
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

        def step() -> object:
            model.train()
            optimizer.zero_grad()
            loss(model).backward()
            optimizer.step()
            return None

        return step

    return make


def causal_training(
    batch: int, length: int, device: torch.device | str = "cpu"
) -> Callable[[nn.Module], Step]:
    ids = tokens(batch, length).to(device)
    return training(lambda model: model(input_ids=ids, labels=ids, use_cache=False).loss)


def images(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(batch))


def cases() -> list[Case]:
    source, target = tokens(1, 32), tokens(1, 32)
    sources, targets = tokens(4, 64), tokens(4, 64)
    labels = torch.arange(8)
    causal = {
        "decode 1 token": decode,
        "forward 64 tokens": causal_forward(64),
        "forward 512 tokens": causal_forward(512),
        "training 4x128 tokens": causal_training(4, 128),
    }
    return [
        Case("GPT-2 124M", gpt2, causal),
        Case("Llama 125M", llama, causal),
        Case(
            "mT5-small",
            mt5,
            {
                "forward 32 tokens": without_gradients(lambda m: m(input_ids=source, labels=target)),
                "forward 4x64 tokens": without_gradients(lambda m: m(input_ids=sources, labels=targets)),
                "training 4x64 tokens": training(lambda m: m(input_ids=sources, labels=targets).loss),
            },
        ),
        Case(
            "ResNet-50",
            resnet,
            {
                "forward 1 image": without_gradients(lambda m: m(pixel_values=images(1))),
                "training 8 images": training(lambda m: m(pixel_values=images(8), labels=labels).loss),
            },
        ),
    ]
