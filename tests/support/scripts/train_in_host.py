"""Trains a small model for 20 steps in a host, unwatched: `train_in_host.py HOST WEIGHTS [fault]`.

It saves the weights. With `fault` an activation becomes infinite in its tenth call.
"""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

STEPS, FAULT_AT = 20, 10
HOST, WEIGHTS, *WORDS = sys.argv[1:]


class Activation(nn.Module):
    """ReLU, whose tenth output is infinite if that is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        fails = "fault" in WORDS and self.calls == FAULT_AT
        return x.relu() + float("inf") if fails else x.relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), Activation(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=1, eos_token_id=2, bos_token_id=3,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.model.layers[1].mlp.act_fn = Activation()
    return model


def trainer() -> nn.Module:
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": words, "labels": words} for words in torch.randint(4, 32, (16, 12))]
    args = TrainingArguments(
        "out", max_steps=STEPS, per_device_train_batch_size=2, use_cpu=True, report_to=[], seed=0, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    model = llama()
    Trainer(model, args, train_dataset=rows).train()
    return model


def sft() -> nn.Module:
    """TRL's trainer for fine-tuning, with a tokenizer of 32 words, and eight texts."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast
    from trl import SFTConfig, SFTTrainer

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    special = {"unk_token": "w0", "pad_token": "w1", "eos_token": "w2", "bos_token": "w3"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, **special)
    texts = [" ".join(f"w{(3 * i + 7 * j) % 28 + 4}" for j in range(12)) for i in range(8)]
    args = SFTConfig(
        "out", max_steps=STEPS, per_device_train_batch_size=2, use_cpu=True, bf16=False, report_to=[], seed=0,
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=False, max_length=16,
    )  # fmt: skip
    model, rows = llama(), Dataset.from_dict({"text": texts})
    SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer).train()
    return model


def loop(forward: Callable[[Tensor], Tensor], step: Callable[[Tensor], object]) -> None:
    """Hand the loss of each step to `step`."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        step((forward(torch.randn(16, 4, generator=generator)) - 1).abs().mean())


def zero() -> nn.Module:
    """Stage 3 of DeepSpeed's ZeRO, as one of the ranks of torchrun: no parameter is left whole."""
    import deepspeed as host

    model = Net()
    stage = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": stage,
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = host.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=True)

    def step(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    loop(engine, step)
    with host.zero.GatheredParameters(list(model.parameters())):
        if os.environ["RANK"] == "0":
            torch.save({name: x.detach().clone() for name, x in model.named_parameters()}, WEIGHTS)
    raise SystemExit


def lightning() -> nn.Module:
    import lightning as host

    class Module(host.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return (self.net(batch[0]) - 1).abs().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    model, rows = Module(), torch.utils.data.TensorDataset(torch.randn(16 * STEPS, 4))
    host.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(model, torch.utils.data.DataLoader(rows, batch_size=16))  # fmt: skip
    return model


def fabric() -> nn.Module:
    from lightning.fabric import Fabric

    host = Fabric(accelerator="cpu", devices=1)
    return train(host, host.setup)


def accelerate() -> nn.Module:
    """Accelerate, in one process or as one of several that `accelerate launch` starts."""
    from accelerate import Accelerator

    host = Accelerator(cpu=True)
    return train(host, host.prepare)


def train(host: Any, prepare: Callable[..., Any]) -> nn.Module:
    """Train with a host that wraps the model and the optimizer, and makes the backward itself."""
    model = Net()
    wrapped, optimizer = prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))

    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        host.backward(loss)
        optimizer.step()

    loop(wrapped, step)
    return model


if __name__ == "__main__":
    torch.manual_seed(0)
    hosts = {host.__name__: host for host in (trainer, lightning, fabric, accelerate, sft, zero)}
    torch.save(hosts[HOST]().state_dict(), WEIGHTS)
