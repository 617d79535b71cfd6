"""Trainings of small models with a planted cause of a spike each, and healthy ones.

Each cause names the classes that are right for it and the modules that may be named. The two halves of either table
were made at one time. The rule of nanwatch was fixed on the first halves alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import cos, pi
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import nanwatch
from nanwatch.report.spike import SpikeReport

VOCABULARY, TOKENS, SAMPLES = 32, 12, 16
AT = 90  # the step at which a cause sets in
STEPS = 112

transformers.logging.set_verbosity_error()


# The trainings: a model, the batch of a step, the loss, an optimizer.


def _sequences(step: int) -> Tensor:
    """Return sequences in which each token follows from the one before."""
    drawn = torch.Generator().manual_seed(step)
    tokens = [torch.randint(0, VOCABULARY, (SAMPLES,), generator=drawn)]
    while len(tokens) < TOKENS:
        tokens.append((5 * tokens[-1] + 3) % VOCABULARY)
    return torch.stack(tokens, dim=1)


def _language(model: nn.Module, **more: Any) -> SimpleNamespace:
    def draw(step: int) -> dict[str, Tensor]:
        tokens = _sequences(step)
        return {"input_ids": tokens, "labels": tokens.clone()}

    return _training(model, draw, lambda model, batch: model(**batch).loss, finds_loss=True, **more)


def _training(
    model: nn.Module,
    draw: Callable[[int], dict[str, Tensor]],
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor],
    *,
    finds_loss: bool = False,
    lr: float = 3e-3,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
) -> SimpleNamespace:
    made = optimizer(model.parameters(), lr=lr)
    return SimpleNamespace(
        model=model.train(), draw=draw, loss=loss, finds_loss=finds_loss, optimizer=made, factor=1.0, batch={}
    )


_SMALL = {"vocab_size": VOCABULARY, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}


def gpt2(**more: Any) -> SimpleNamespace:
    config = transformers.GPT2Config(n_layer=3, n_embd=32, n_head=4, n_positions=TOKENS, **_SMALL)
    return _language(transformers.GPT2LMHeadModel(config), **more)


def llama(**more: Any) -> SimpleNamespace:
    config = transformers.LlamaConfig(
        num_hidden_layers=3, hidden_size=32, intermediate_size=64, num_attention_heads=4, **_SMALL
    )
    return _language(transformers.LlamaForCausalLM(config), **more)


def qwen2(**more: Any) -> SimpleNamespace:
    config = transformers.Qwen2Config(
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        **_SMALL,
    )
    return _language(transformers.Qwen2ForCausalLM(config), **more)


def t5(**more: Any) -> SimpleNamespace:
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


def bert(**more: Any) -> SimpleNamespace:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        num_labels=4,
    )

    def draw(step: int) -> dict[str, Tensor]:
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


def vit(**more: Any) -> SimpleNamespace:
    config = transformers.ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        image_size=8,
        patch_size=2,
        num_labels=4,
    )

    def draw(step: int) -> dict[str, Tensor]:
        pictures, labels = _pictures(step, 0.3)
        return {"pixel_values": pictures, "labels": labels}

    model = transformers.ViTForImageClassification(config)
    return _training(model, draw, lambda model, batch: model(**batch).loss, finds_loss=True, **more)


def _of_samples(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def convolutions(**more: Any) -> SimpleNamespace:
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

    def draw(step: int) -> dict[str, Tensor]:
        x, y = _pictures(step)
        return {"x": x, "y": y}

    return _training(model, draw, _of_samples, **more)


def residual(**more: Any) -> SimpleNamespace:
    config = transformers.ResNetConfig(
        num_channels=3,
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        num_labels=4,
    )

    def draw(step: int) -> dict[str, Tensor]:
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


def regression(**more: Any) -> SimpleNamespace:
    def draw(step: int) -> dict[str, Tensor]:
        drawn = torch.Generator().manual_seed(step)
        x = torch.randn(64, 8, generator=drawn)
        return {"x": x, "y": (x[:, :4].sum(1, keepdim=True) + 0.3 * torch.randn(64, 1, generator=drawn))}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
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


def recurrent(**more: Any) -> SimpleNamespace:
    def draw(step: int) -> dict[str, Tensor]:
        return {"x": _sequences(step)}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        tokens = batch["x"]
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return _training(_Recurrent(), draw, loss, **more)


Plant = Callable[[SimpleNamespace, int], None]


def train(
    make: Callable[..., SimpleNamespace],
    plant: Plant | None = None,
    *,
    steps: int = STEPS,
    seed: int = 0,
    schedule: Callable[[int], float] = lambda step: 1.0,
    evaluates: bool = False,
    scales: bool = False,
    accumulates: int = 1,
    clips: float = 0.0,
    **options: Any,
) -> tuple[SpikeReport, ...]:
    """Train with spikes=True until there is a spike, and return it. `plant` is called before the forward of each step.

    `schedule` gives the factor of the learning rate. The others: an evaluation after every 20th step, a GradScaler
    whose scale doubles every 30 steps, several backwards for each step, and the norm that gradients are clipped to.
    """
    torch.manual_seed(seed)
    training = make()
    rates = [group["lr"] for group in training.optimizer.param_groups]
    scaler = torch.amp.GradScaler("cpu", enabled=scales, growth_interval=30)
    watch = nanwatch.watch(training.model, spikes=True, on_nonfinite="record", attention=1, **options)
    try:
        for step in range(steps):
            for group, lr in zip(training.optimizer.param_groups, rates, strict=True):
                group["lr"] = lr * schedule(step)
            training.optimizer.zero_grad()
            for part in range(accumulates):
                training.batch = training.draw(accumulates * step + part + 10_000 * seed)
                if plant is not None:
                    plant(training, step)
                loss = training.loss(training.model, training.batch)
                if not training.finds_loss:
                    watch.note_loss(loss)
                scaler.scale(training.factor * loss.mean() / accumulates).backward()
            scaler.unscale_(training.optimizer)
            if clips:
                nn.utils.clip_grad_norm_(training.model.parameters(), clips)
            scaler.step(training.optimizer)
            scaler.update()
            if watch.spikes:
                break
            if evaluates and step % 20 == 19:
                with torch.no_grad():
                    training.model.eval()
                    training.loss(training.model, training.draw(5_000 + step))
                    training.model.train()
        return watch.spikes
    finally:
        watch.stop()


# The causes. Each sets in at AT.


class Planted(NamedTuple):
    """A cause: the training, what is done to it, the classes that are right, and the modules that may be named."""

    name: str
    make: Callable[..., SimpleNamespace]
    plant: Plant
    causes: tuple[str, ...]
    modules: tuple[str, ...] = ()  # none: any, or none
    since: int = AT  # the first step at which it may be told


def at(act: Callable[[SimpleNamespace], None]) -> Plant:
    """Do this at the step AT."""
    return lambda training, step: act(training) if step == AT else None


def from_(act: Callable[[SimpleNamespace], None]) -> Plant:
    """Do this at each step from AT on."""
    return lambda training, step: act(training) if step >= AT else None


def bad_sample(key: str, factor: float) -> Plant:
    def act(training: SimpleNamespace) -> None:
        training.batch[key][3] *= factor

    return at(act)


def rate(factor: float) -> Plant:
    def act(training: SimpleNamespace, step: int) -> None:
        if step >= AT:
            for group in training.optimizer.param_groups:
                group["lr"] *= factor

    return act


def random_labels(key: str, most: int) -> Plant:
    def act(training: SimpleNamespace) -> None:
        training.batch[key] = torch.randint(0, most, training.batch[key].shape)

    return at(act)


def scaled_weight(name: str, factor: float) -> Plant:
    def act(training: SimpleNamespace) -> None:
        with torch.no_grad():
            training.model.get_parameter(name).mul_(factor)

    return at(act)


def growing_weights(*names: str, factor: float) -> Plant:
    """Let weights grow by a factor in each step from half of AT on."""

    def act(training: SimpleNamespace, step: int) -> None:
        if step >= AT // 2:
            with torch.no_grad():
                for name in names:
                    training.model.get_parameter(name).mul_(factor)

    return act


def scaled_output(name: str, factor: float) -> Plant:
    def act(training: SimpleNamespace) -> None:
        training.model.get_submodule(name).register_forward_hook(lambda _, __, output: factor * output)

    return at(act)


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.factor * gradients[0], None


def scaled_gradient(name: str, factor: float) -> Plant:
    """Scale the gradient that this module gets."""

    def act(training: SimpleNamespace) -> None:
        module = training.model.get_submodule(name)
        module.register_forward_pre_hook(lambda _, args: (_Backward.apply(args[0], factor), *args[1:]))

    return at(act)


def scaled_loss(factor: float) -> Plant:
    def act(training: SimpleNamespace) -> None:
        training.factor = factor

    return at(act)


def target(factor: float) -> Plant:
    def act(training: SimpleNamespace) -> None:
        training.batch["y"][5] = factor

    return at(act)


def without_gradient(name: str) -> Plant:
    """Give the weights of a module zeros as gradients until AT, with Adam's second moment of short memory."""

    def act(training: SimpleNamespace, step: int) -> None:
        module = training.model.get_submodule(name)
        if step == 0:
            for group in training.optimizer.param_groups:
                group["betas"] = (0.9, 0.9999)
            training.closed = True
            for x in module.parameters():
                x.register_hook(lambda grad: torch.zeros_like(grad) if training.closed else grad)
        if step == AT:
            training.closed = False

    return act


def closed_until(name: str, factor: float) -> Plant:
    """Let a module return zeros until AT, and then many times its output."""

    def act(training: SimpleNamespace, step: int) -> None:
        if step == 0:
            training.factor_of_output = 0.0
            module = training.model.get_submodule(name)
            module.register_forward_hook(lambda _, __, output: training.factor_of_output * output)
        if step == AT:
            training.factor_of_output = factor

    return act


FIRST_HALF = (
    Planted("one sample of an image net", convolutions, bad_sample("x", -100), ("input",), ("0",)),
    Planted("learning rate of Adam", gpt2, rate(30), ("learning rate",)),
    Planted(
        "second moment after zeros",
        partial(regression, lr=0.03),
        without_gradient("branch"),
        ("optimizer",),
        ("branch",),
    ),
    Planted(
        "attention logits that grow",
        gpt2,
        growing_weights("transformer.h.1.attn.c_attn.weight", factor=3.0),
        ("attention", "weight"),
        ("transformer.h.1.attn",),
        AT // 2,
    ),
    Planted(
        "a dead layer revives",
        llama,
        closed_until("model.layers.1.mlp.down_proj", 30),
        ("module",),
        ("model.layers.1.mlp",),
    ),
    Planted(
        "gradient of one layer",
        gpt2,
        scaled_gradient("transformer.h.1.mlp.c_fc", 100),
        ("gradient",),
        ("transformer.h.1", "transformer.h.0"),
    ),
    Planted("labels of one batch", bert, random_labels("labels", 4), ("loss",)),
    Planted(
        "a weight overwritten",
        llama,
        scaled_weight("model.layers.1.mlp.down_proj.weight", 30),
        ("weight",),
        ("model.layers.1.mlp.down_proj",),
    ),
    Planted(
        "output of one module",
        qwen2,
        scaled_output("model.layers.1.mlp", 50),
        ("module",),
        ("model.layers.1.mlp",),
    ),
    Planted("loss times 100", llama, scaled_loss(100), ("loss",)),
    Planted(
        "weight of a norm",
        gpt2,
        scaled_weight("transformer.h.2.ln_1.weight", 40),
        ("weight",),
        ("transformer.h.2.ln_1",),
    ),
    Planted("tokens of one batch", recurrent, random_labels("x", VOCABULARY), ("loss",)),
)
SECOND_HALF = (
    Planted("one sample of a ViT", vit, bad_sample("pixel_values", -50), ("input",), ("vit.embeddings",)),
    Planted(
        "learning rate of SGD",
        partial(convolutions, optimizer=torch.optim.SGD, lr=0.1),
        rate(30),
        ("learning rate",),
    ),
    Planted("learning rate of T5", t5, rate(40), ("learning rate",)),
    Planted(
        "second moment of a convolution",
        partial(convolutions, lr=0.03),
        without_gradient("4"),
        ("optimizer",),
        ("4",),
    ),
    Planted(
        "queries of one layer",
        vit,
        scaled_weight("vit.layers.0.attention.q_proj.weight", 200),
        ("weight", "attention"),
        ("vit.layers.0.attention",),
    ),
    Planted("a branch opens", regression, closed_until("branch", 20), ("module",), ("branch",)),
    Planted(
        "gradient of a layer of Llama",
        llama,
        scaled_gradient("model.layers.2.mlp.down_proj", 1000),
        ("gradient",),
        ("model.layers.2", "model.layers.1"),
    ),
    Planted("labels of a ViT", vit, random_labels("labels", 4), ("loss",)),
    Planted(
        "rows of an embedding",
        gpt2,
        scaled_weight("transformer.wte.weight", 30),
        ("weight",),
        ("transformer.wte",),
    ),
    Planted(
        "output of a residual layer",
        residual,
        scaled_output("resnet.encoder.stages.1.layers.0", -50),
        ("module",),
        ("resnet.encoder.stages.1",),
    ),
    Planted("loss times 1000", regression, scaled_loss(1000), ("loss",)),
    Planted("one target", regression, target(1000.0), ("loss",)),
)


# Healthy trainings.


class Healthy(NamedTuple):
    """A training without a spike, and how it is run."""

    name: str
    make: Callable[..., SimpleNamespace]
    how: dict[str, Any]


def _warm_up(step: int) -> float:
    return min(1.0, (step + 1) / 60)


def _cosine(step: int) -> float:
    return _warm_up(step) * (0.55 + 0.45 * cos(pi * min(step, 200) / 200))


def _falls(step: int) -> float:
    return 1.0 if step < 80 else 0.1 if step < 140 else 0.01


def _restarts(step: int) -> float:
    return 0.505 + 0.495 * cos(pi * (step % 70) / 70)


def _one_cycle(step: int) -> float:
    return 0.04 + 0.96 * (step / 70 if step < 70 else max(0.0, (200 - step) / 130))


_EVERY_MODEL = (gpt2, llama, qwen2, t5, bert, vit, convolutions, residual, regression, recurrent)
_sgd = partial(torch.optim.SGD, momentum=0.9)


def _healthy(seed: int, *hows: dict[str, Any]) -> tuple[Healthy, ...]:
    made = []
    for i, make in enumerate(_EVERY_MODEL):
        for j, how in enumerate(hows):
            if (i + j) % 2 == seed % 2:
                words = ", ".join(
                    one if given is True else f"{one} {given}"
                    for one, given in how.items()
                    if one != "schedule"
                )
                schedule = how["schedule"].__name__.strip("_") if "schedule" in how else "constant"
                made.append(Healthy(f"{make.__name__}, {schedule}, {words}", make, {**how, "seed": seed}))
    return tuple(made)


_HOWS: tuple[dict[str, Any], ...] = (
    {"schedule": _warm_up, "evaluates": True},
    {"schedule": _falls, "clips": 1.0},
    {"schedule": _one_cycle, "scales": True},
    {"schedule": _cosine, "accumulates": 2},
    {"schedule": _restarts, "evaluates": True, "scales": True},
)
HEALTHY_FIRST, HEALTHY_SECOND = _healthy(1, *_HOWS), _healthy(2, *_HOWS)
