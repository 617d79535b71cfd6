"""Trains a small model for 20 steps in a host, unwatched: `train_in_host.py HOST WEIGHTS [fault]`.

It saves the weights. With `fault` an activation becomes infinite in its tenth call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
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
    """A residual network of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(4, 8), Activation(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(x)))


def language_model() -> tuple[Any, Any, Any]:
    """A tiny Llama, a tokenizer of 32 words, and eight texts."""
    from datasets import Dataset
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(32)}
    inner = Tokenizer(WordLevel(words, unk_token="w0"))
    inner.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="w0", pad_token="w1", eos_token="w2", bos_token="w3"
    )
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=1, eos_token_id=2, bos_token_id=3,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.model.layers[1].mlp.act_fn = Activation()
    texts = [" ".join(f"w{(3 * i + 7 * j) % 28 + 4}" for j in range(12)) for i in range(8)]
    return model, tokenizer, Dataset.from_dict({"text": texts, "prompt": texts})


def sft() -> nn.Module:
    """TRL's trainer for fine-tuning."""
    from trl import SFTConfig, SFTTrainer

    model, tokenizer, data = language_model()
    args = SFTConfig(
        "out", max_steps=STEPS, per_device_train_batch_size=2, use_cpu=True, bf16=False, report_to=[], seed=0,
        save_strategy="no", disable_tqdm=True, gradient_checkpointing=False, max_length=16,
    )  # fmt: skip
    SFTTrainer(
        model,
        args,
        train_dataset=data.remove_columns("prompt"),
        processing_class=tokenizer,
    ).train()
    return model


def grpo() -> nn.Module:
    """TRL's trainer for reinforcement learning, which samples with the model itself."""
    from trl import GRPOConfig, GRPOTrainer

    model, tokenizer, data = language_model()
    args = GRPOConfig(
        "out", max_steps=STEPS, per_device_train_batch_size=4, num_generations=4, use_cpu=True, bf16=False,
        report_to=[], seed=0, save_strategy="no", disable_tqdm=True, gradient_checkpointing=False,
        max_completion_length=4,
    )  # fmt: skip
    GRPOTrainer(
        model,
        reward_funcs=lambda completions, **rest: [float(len(text) % 5) for text in completions],
        args=args,
        train_dataset=data.remove_columns("text"),
        processing_class=tokenizer,
    ).train()
    return model


def loop(forward: Callable[[Tensor], Tensor], step: Callable[[Tensor], object]) -> None:
    """Hand the loss of each step to `step`."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        step((forward(torch.randn(16, 4, generator=generator)) - 1).abs().mean())


def zero(stage: int) -> nn.Module:
    """DeepSpeed's ZeRO, alone or as one of the ranks of torchrun. In stage 3 no parameter is left whole."""
    import deepspeed as host

    for name, value in {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
    }.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("MASTER_PORT", "29517")
    model = Net()
    config = {
        "train_micro_batch_size_per_gpu": 16,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    engine, *_ = host.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=True)

    def step(loss: Tensor) -> None:
        engine.backward(loss)
        engine.step()

    loop(engine, step)
    with host.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
        if os.environ["RANK"] == "0":
            torch.save({name: x.detach().clone() for name, x in model.named_parameters()}, WEIGHTS)
    raise SystemExit


def fabric() -> nn.Module:
    """Lightning Fabric."""
    from lightning.fabric import Fabric

    host = Fabric(accelerator="cpu", devices=1)
    model = Net()
    _train(host, *host.setup(model, torch.optim.AdamW(model.parameters(), lr=0.01)))
    return model


def accelerate() -> nn.Module:
    """Accelerate, in one process or as one of several that `accelerate launch` starts."""
    from accelerate import Accelerator

    host = Accelerator(cpu=True)
    model = Net()
    _train(host, *host.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01)))
    return model


def _train(host: Any, wrapped: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train with a host that makes the backward itself."""

    def step(loss: Tensor) -> None:
        optimizer.zero_grad()
        host.backward(loss)
        optimizer.step()

    loop(wrapped, step)


def litgpt() -> nn.Module:
    """The pretraining recipe of litgpt, with data of its own kind."""
    from pathlib import Path

    from litgpt import Config
    from litgpt import model as host
    from litgpt.args import EvalArgs, TrainArgs
    from litgpt.data import DataModule
    from litgpt.pretrain import setup
    from torch.utils.data import DataLoader

    class Numbers(DataModule):
        """Sequences of 17 tokens."""

        def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int = 16) -> None:
            self.batch_size = batch_size

        def train_dataloader(self) -> DataLoader[Any]:
            generator = torch.Generator().manual_seed(0)
            rows = torch.randint(0, 64, (STEPS * self.batch_size * 2, 17), generator=generator)
            return DataLoader(rows, batch_size=self.batch_size)  # type: ignore[arg-type]

        val_dataloader = train_dataloader

    class Mlp(host.GptNeoxMLP):
        """The tenth output is infinite if that is asked for."""

        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += x.device.type == "cpu"  # litgpt counts operations with meta tensors
            fails = "fault" in WORDS and self.calls == FAULT_AT
            return super().forward(x) + float("inf") if fails else super().forward(x)

    host.GptNeoxMLP = Mlp  # type: ignore[misc]
    config = Config(
        name="tiny",
        block_size=16,
        vocab_size=64,
        padded_vocab_size=64,
        n_layer=2,
        n_head=2,
        n_embd=16,
        bias=False,
    )
    sys.argv[1:] = ["tiny"]  # litgpt reads them once more when it saves
    setup(
        "tiny",
        model_config=config,
        out_dir=Path("out"),
        precision="32-true",
        data=Numbers(),
        train=TrainArgs(
            save_interval=None, log_interval=10, global_batch_size=2, micro_batch_size=2, max_tokens=STEPS * 32,
            max_seq_length=16, tie_embeddings=False, lr_warmup_steps=2, min_lr=1e-5, max_norm=1.0,
        ),
        eval=EvalArgs(interval=1000, max_iters=1, initial_validation=False, final_validation=False),
        devices=1,
        seed=0,
        logger_name="csv",
    )  # fmt: skip
    saved = torch.load("out/final/lit_model.pth", weights_only=False)["model"]  # it has the data loader too
    torch.save(saved, WEIGHTS)
    raise SystemExit


class Tokens(torch.utils.data.Dataset[Any]):
    """Tokenizer and data of torchtune: sequences of 16 tokens, two for each step."""

    pad_id = 0

    def __init__(self, tokenizer: Any = None) -> None:
        self.rows = torch.randint(1, 64, (2 * STEPS, 16), generator=torch.Generator().manual_seed(0)).tolist()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        return {"tokens": self.rows[index], "labels": self.rows[index]}


def small_decoder() -> nn.Module:
    """A Llama of torchtune with two layers."""
    from torchtune.models.llama3_2 import llama3_2

    model = llama3_2(
        vocab_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=2,
        embed_dim=16,
        max_seq_len=16,
        intermediate_dim=32,
    )
    model.layers[1].mlp.activation = Activation()
    return model


def torchtune() -> nn.Module:
    """The recipe of torchtune that trains all weights on one device, as `tune run` runs it."""
    from contextlib import suppress
    from glob import glob

    from omegaconf import OmegaConf
    from torchtune._cli.tune import main

    os.makedirs("start", exist_ok=True)
    torch.save(small_decoder().state_dict(), "start/model.pt")
    own = "train_in_host"
    sys.modules[own] = sys.modules[__name__]
    config = {
        "output_dir": "out", "seed": 0, "shuffle": True, "batch_size": 2, "epochs": 1, "max_steps_per_epoch": STEPS,
        "device": "cpu", "dtype": "fp32", "compile": False, "resume_from_checkpoint": False,
        "gradient_accumulation_steps": 1, "optimizer_in_bwd": False, "clip_grad_norm": 1.0,
        "model": {"_component_": f"{own}.small_decoder"},
        "tokenizer": {"_component_": f"{own}.Tokens"},
        "dataset": {"_component_": f"{own}.Tokens"},
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 0.01},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "metric_logger": {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": "out"},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelTorchTuneCheckpointer", "checkpoint_dir": "start",
            "checkpoint_files": ["model.pt"], "output_dir": "out", "model_type": "LLAMA3_2",
        },
    }  # fmt: skip
    OmegaConf.save(OmegaConf.create(config), "tiny.yaml")
    sys.argv[1:] = ["run", "full_finetune_single_device", "--config", "tiny.yaml"]
    with suppress(SystemExit):
        main()
    [saved] = glob("out/epoch_0/*.bin")
    os.rename(saved, WEIGHTS)
    raise SystemExit


if __name__ == "__main__":
    torch.manual_seed(0)
    trained = {"sft": sft, "grpo": grpo, "fabric": fabric, "accelerate": accelerate, "litgpt": litgpt}
    trained["torchtune"] = torchtune
    trained |= {f"zero-{stage}": partial(zero, stage) for stage in (1, 2, 3)}
    torch.save(trained[HOST]().state_dict(), WEIGHTS)
