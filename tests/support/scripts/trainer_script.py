"""Trains a tiny GPT-2 with transformers' Trainer, a learning rate that is too high."""

# ruff: noqa: T201

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments


def main():
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=1
    )
    words = torch.randint(2, 64, (32, 5))
    rows = [{"input_ids": row, "labels": row} for row in words]
    trainer = Trainer(GPT2LMHeadModel(config), args, train_dataset=rows, eval_dataset=rows[:4])
    result = trainer.train()
    print("done after", result.global_step, "steps", file=sys.stdout)


if __name__ == "__main__":
    main()
