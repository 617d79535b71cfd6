"""Small natural trainings, healthy and doomed, from which `forecast_runs.py` measures the forecasts.

A training is a model, an optimizer, a learning rate, a precision, a task and a schedule. Nothing in it knows of
forecasts: whether it overflows, and when, is what happens.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import cos, pi
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

# A batch is what the model is called with and the target; a loss takes the output and the target.
Sample = Callable[[], tuple[dict[str, Any], Any]]
Loss = Callable[[Any, Any], Tensor]


TABLE = Path(__file__).with_name("forecast_trainings.txt")


@dataclass(frozen=True)
class Training:
    """One training. `precision` is "float32", "float16" or "bfloat16" (pure), or one of these after "autocast-"."""

    model: str
    optimizer: str
    rate: float
    precision: str = "float32"
    task: str = "plain"
    schedule: str = "constant"
    steps: int = 600
    seed: int = 0

    @property
    def name(self) -> str:
        parts = (self.model, self.task, self.optimizer, f"{self.rate:g}", self.precision, self.schedule)
        return "_".join((*parts, f"s{self.seed}"))


class Residual(nn.Module):
    """A block of a residual stream, gated or not, with a norm or without."""

    def __init__(self, width: int, *, norm: bool, gated: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.gate = nn.Linear(width, 3 * width) if gated else None
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        y = self.act(self.up(y)) if self.gate is None else functional.silu(self.gate(y)) * self.up(y)
        return x + self.down(y)


def residual(depth: int, *, norm: bool, gated: bool) -> nn.Module:
    blocks = [Residual(24, norm=norm, gated=gated) for _ in range(depth)]
    return nn.Sequential(nn.Linear(16, 24), *blocks, nn.Linear(24, 1))


class Reader(nn.Module):
    """A recurrent net that answers after its last step."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.rnn: nn.Module = (
            nn.RNN(16, 24, nonlinearity="relu", batch_first=True)
            if kind == "rnn"
            else getattr(nn, kind.upper())(16, 24, batch_first=True)
        )
        self.head = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


class Unrolled(nn.Module):
    """A linear recurrence, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.enter, self.head = nn.Linear(24, 24), nn.Linear(16, 24), nn.Linear(24, 1)
        nn.init.orthogonal_(self.cell.weight)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), 24)
        for step in x.unbind(1):
            state = torch.relu(self.cell(state)) + self.enter(step)
        return self.head(state)


class Factors(nn.Module):
    """A recommender: a score is the product of two embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(40, 8), nn.Embedding(40, 8)

    def forward(self, pairs: Tensor) -> Tensor:
        return (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1, keepdim=True)


def cnn(norm: bool) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 8), (8, 12), (12, 12)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1)]
        layers += [nn.BatchNorm2d(outputs)] if norm else []
        layers += [nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4))


def autoencoder(activation: Callable[[], nn.Module]) -> nn.Module:
    sizes = (16, 24, 4, 24, 16)
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), activation()]
    return nn.Sequential(*layers[:-1])


class Vae(nn.Module):
    """A variational autoencoder: the deviation is an exponential."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(16, 24), nn.Linear(4, 16)
        self.mean, self.log_var = nn.Linear(24, 4), nn.Linear(24, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = torch.relu(self.enter(x))
        mean, log_var = self.mean(y), self.log_var(y)
        return self.leave(mean + torch.randn_like(mean) * torch.exp(log_var / 2)), mean, log_var


def language_model(kind: str) -> nn.Module:
    import transformers

    common = {"vocab_size": 64}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=32, **common)
        return transformers.GPT2LMHeadModel(config)
    if kind == "t5":
        shape = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2, "num_layers": 2}
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(decoder_start_token_id=0, **shape, **common)
        )
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, **common
        )
    )
    if kind == "llama":
        return llama
    import peft

    lora = peft.LoraConfig(
        r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.05
    )
    return peft.get_peft_model(llama, lora)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "residual": lambda: residual(6, norm=True, gated=False),
    "residual-no-norm": lambda: residual(4, norm=False, gated=False),
    "gated": lambda: residual(2, norm=False, gated=True),
    "mlp": lambda: nn.Sequential(
        nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1)
    ),
    "linear": lambda: nn.Linear(16, 1),
    "factors": Factors,
    "rnn": lambda: Reader("rnn"),
    "gru": lambda: Reader("gru"),
    "lstm": lambda: Reader("lstm"),
    "unrolled": Unrolled,
    "cnn": lambda: cnn(norm=True),
    "cnn-no-norm": lambda: cnn(norm=False),
    "autoencoder": lambda: autoencoder(nn.Tanh),
    "linear-autoencoder": lambda: autoencoder(nn.Identity),
    "vae": Vae,
    **{name: lambda name=name: language_model(name) for name in ("gpt2", "llama", "t5", "lora")},  # type: ignore[misc]
}


def sample_of(training: Training, made: torch.Generator) -> Sample:
    """Return what draws the batches of a training."""

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=made)

    def sample() -> tuple[dict[str, Any], Any]:
        name = training.model
        if name in ("gpt2", "llama", "lora", "t5"):
            tokens = torch.randint(1, 64, (4, 12), generator=made)
            if training.task == "learnable":
                tokens = (tokens[:, :1] + torch.arange(12)) % 63 + 1
            return {"input_ids": tokens, "labels": tokens}, None
        if name.startswith("cnn"):
            kinds = torch.randint(4, (16,), generator=made)
            return {"input": draw(16, 3, 8, 8) + kinds[:, None, None, None] / 2}, kinds
        if name == "factors":
            pairs = torch.randint(40, (32, 2), generator=made)
            return {"pairs": pairs}, (pairs[:, :1] % 3 - pairs[:, 1:] % 2).float()
        if name in ("rnn", "gru", "lstm", "unrolled"):
            x = draw(16, 12, 16)
            return {"x": x}, x.mean(1).sum(1, keepdim=True)
        x = draw(16, 16)
        if name == "linear":
            x = x * torch.linspace(0.3, 2, 16)
        key = "x" if name == "vae" else "input"
        return {key: x}, x if "autoencoder" in name or name == "vae" else x.sum(1, keepdim=True)

    return sample


def loss_of(training: Training) -> Loss:
    """Return the loss: for language models their own, else by the task."""

    def loss(output: Any, target: Any) -> Tensor:
        if training.model == "vae":
            made, mean, log_var = (x.float() for x in output)
            divergence = 0.5 * (mean.square() + log_var.exp() - 1 - log_var).sum(1).mean()
            # The wrong sign is a classic.
            sign = -1 if training.task == "wrong-sign" else 1
            return (made - target).square().mean() + sign * 0.1 * divergence
        if target is None:
            return -output.loss.float() if training.task == "wrong-sign" else output.loss.float()
        made = output.float()
        if training.model.startswith("cnn"):
            return (-1 if training.task == "wrong-sign" else 1) * functional.cross_entropy(made, target)
        if training.task.startswith("target-"):  # too large for the format
            return (made - float(training.task[7:])).abs().mean()
        if training.task == "unbounded":
            return -torch.log(made.square().mean() + 1e-6)
        if training.task == "critic":  # without a bound on its slope
            return (made * target.sign()).mean()
        if training.task == "huber":
            return functional.smooth_l1_loss(made, target)
        return (made - target).square().mean()

    return loss


class Lion(torch.optim.Optimizer):
    """Steps of one size, by the sign of the momentum."""

    def __init__(self, parameters: Iterator[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("m", torch.zeros_like(p))
                p.sub_(group["lr"] * (0.9 * momentum + 0.1 * p.grad).sign())
                momentum.mul_(0.99).add_(p.grad, alpha=0.01)


def optimizer_of(training: Training, model: nn.Module) -> torch.optim.Optimizer:
    weights = [p for p in model.parameters() if p.requires_grad]
    rate, eps = training.rate, 1e-4 if training.precision == "float16" else 1e-8
    made: dict[str, Callable[[], torch.optim.Optimizer]] = {
        "sgd": lambda: torch.optim.SGD(weights, rate),
        "momentum": lambda: torch.optim.SGD(weights, rate, momentum=0.9),
        "adam": lambda: torch.optim.Adam(weights, rate, eps=eps),
        "adamw": lambda: torch.optim.AdamW(weights, rate, eps=eps),
        "rmsprop": lambda: torch.optim.RMSprop(weights, rate, eps=eps),
        "adafactor": lambda: torch.optim.Adafactor(weights, rate),
        "lion": lambda: Lion(iter(weights), rate),
    }
    return made[training.optimizer]()


def factor_of(training: Training) -> Callable[[int], float]:
    """Return the learning rate's factor by step."""
    steps = training.steps

    def factor(step: int) -> float:
        if training.schedule == "warmup":
            return min(1.0, (step + 1) / (0.2 * steps))
        if training.schedule == "cosine":
            return min(1.0, (step + 1) / (0.05 * steps)) * (0.5 + 0.5 * cos(pi * step / steps))
        if training.schedule == "step":
            return 0.3 ** (3 * step // steps)
        if training.schedule == "raised":  # a restart that came out too high
            return 1.0 if step < steps // 4 else 3.0
        return 1.0

    return factor


def run(training: Training) -> Iterator[nn.Module]:
    """Train: the model first, and then again after each of its batches, evaluations included."""
    torch.manual_seed(training.seed)
    model = MODELS[training.model]()
    kind = training.precision.removeprefix("autocast-")
    dtype = getattr(torch, kind)
    is_autocast = training.precision != kind
    if not is_autocast:
        model.to(dtype)
    optimizer = optimizer_of(training, model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor_of(training))
    scaler = torch.amp.GradScaler("cpu", enabled=is_autocast and kind == "float16", init_scale=1024.0)
    loss, draw = loss_of(training), sample_of(training, torch.Generator().manual_seed(training.seed + 1))

    def forward() -> Tensor:
        inputs, target = draw()
        if not is_autocast:
            inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
        with torch.autocast("cpu", dtype=dtype, enabled=is_autocast):
            output = model(*inputs.values()) if "input_ids" not in inputs else model(**inputs)
        return loss(output, target)

    yield model
    for step in range(training.steps):
        scaler.scale(forward()).backward()
        yield model
        scaler.unscale_(optimizer)
        if training.schedule != "unclipped" and training.optimizer not in ("sgd", "lion"):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        if training.schedule == "evaluated" and step % 40 == 39:
            model.eval()
            for _ in range(8):
                with torch.no_grad():
                    forward()
                yield model
            model.train()


def trainings() -> list[Training]:
    """Return all of them, healthy ones and doomed ones; forecast_trainings.txt lists them."""
    made: list[Training] = []
    columns = ("precision", "task", "schedule", "steps", "seeds")
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        models, optimizer, rates, *rest = line.split()
        given: dict[str, Any] = {k: v for k, v in zip(columns, rest, strict=True) if v != "-"}
        seeds = int(given.pop("seeds", 1))
        if "steps" in given:
            given["steps"] = int(given["steps"])
        for number, (model, rate) in enumerate(itertools.product(models.split(","), rates.split(","))):
            made += [
                Training(model, optimizer, float(rate), seed=10 * number + seed, **given)
                for seed in range(seeds)
            ]
    return made
