"""Trainings with a planted cause of a spike, and healthy ones, for `judge_spikes.py`.

Each cause names the classes that are right for it and the modules that may be named. Halves were written together. The
rule of nanwatch was chosen on the first halves (of `JUMPS` and `CALM`, those with an even place) alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import cos, pi
from typing import Any, NamedTuple

import torch
from _spike_models import (
    VOCABULARY,
    bert,
    convolutions,
    gpt2,
    llama,
    qwen2,
    recurrent,
    regression,
    residual,
    t5,
    vit,
)
from _spike_networks import (
    autoencoder,
    blobs,
    cnn,
    contrastive,
    decoder,
    denoiser,
    encoder,
    gan,
    gru,
    lstm,
    mlp,
    recommender,
    sgd,
    vae,
)
from _spike_training import (
    AT,
    Plant,
    Training,
    at,
    closed_until,
    growing_weights,
    random_labels,
    rate,
    scaled_batch,
    scaled_gradient,
    scaled_loss,
    scaled_output,
    scaled_weight,
    shifted_labels,
    spoilt_gradients,
    spoilt_state,
    target,
    without_gradient,
)


class Planted(NamedTuple):
    """A cause: the training, what is done to it, the classes that are right, and the modules that may be named."""

    name: str
    make: Callable[..., Training]
    plant: Plant
    causes: tuple[str, ...]
    modules: tuple[str, ...] = ()  # none: any, or none
    since: int = AT  # the first step at which it may be told
    seed: int = 0


class Healthy(NamedTuple):
    """A training without a spike, and how it is run."""

    name: str
    make: Callable[..., Training]
    how: dict[str, Any]


FIRST_HALF = (
    Planted("one sample of an image net", convolutions, scaled_batch("x", -100, 3), ("input",), ("0",)),
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
    Planted(
        "one sample of a ViT", vit, scaled_batch("pixel_values", -50, 3), ("input",), ("vit.embeddings",)
    ),
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


def _wide(x: int) -> Callable[[Training], None]:
    """Let every step from now on see this item."""

    def act(training: Training) -> None:
        training.batch["items"][9] = x

    return act


def _both(*plants: Plant) -> Plant:
    def act(training: Training, step: int) -> None:
        for one in plants:
            one(training, step)

    return act


def _summed(training: Training) -> None:
    training.factor = 32.0


def _ratings(training: Training) -> None:
    training.batch["scale"] = torch.tensor(8.0)


def _alike(training: Training) -> None:
    training.batch["y"] = torch.arange(32).flip(0)


_I, _L, _R, _W, _A = ("input",), ("loss",), ("learning rate",), ("weight",), ("weight", "attention")
_O, _G, _M = ("optimizer",), ("gradient", "optimizer"), ("module",)
_adamw, _adam = torch.optim.AdamW, torch.optim.Adam
# Even places: on these the rule was chosen. Odd places: held back. The seed is the place.
_PLANTED: tuple[tuple[Callable[..., Training], Plant, tuple[str, ...], str], ...] = (
    (lstm, scaled_batch("x", 80), _I, "inputs x 80"),
    (mlp, scaled_batch("x", 20), _I, "inputs x 20"),
    (partial(mlp, optimizer=sgd, lr=0.01), scaled_batch("x", -30, 3), _I, "one sample x -30"),
    (convolutions, scaled_batch("x", 60), _I, "inputs x 60"),
    (autoencoder, scaled_batch("x", 6), _I, "inputs x 6"),
    (vae, scaled_batch("x", 10), _I, "inputs x 10"),
    (partial(mlp, lr=1e-2), scaled_batch("x", 0.02), _I, "inputs x 0.02"),
    (partial(autoencoder, optimizer=sgd, lr=0.02), scaled_batch("x", 25, 7), _I, "one sample x 25"),
    (gan, scaled_batch("x", -30), _I, "real points x -30"),
    (partial(lstm, optimizer=sgd, lr=0.02), scaled_batch("x", 200), _I, "inputs x 200"),
    (contrastive, scaled_batch("x", -1), _L, "pictures of the opposite"),
    (blobs, scaled_batch("x", 300, 3, 5), _I, "two samples x 300"),
    (mlp, scaled_batch("y", 12), _L, "targets x 12"),
    (blobs, shifted_labels("y", 5), _L, "labels of the next class"),
    (cnn, shifted_labels("y", 4), _L, "labels of the next class"),
    (gru, shifted_labels("y", 3), _L, "labels of the next class"),
    (decoder, random_labels("y", 24), _L, "random tokens as labels"),
    (recommender, at(_ratings), _L, "ratings x 8"),
    (contrastive, at(_alike), _L, "pairs in reverse"),
    (lstm, scaled_batch("y", -15), _L, "targets x -15"),
    (mlp, rate(300), _R, "rate x 300"),
    (decoder, rate(40), _R, "rate x 40"),
    (partial(mlp, optimizer=sgd, lr=0.01), rate(30), _R, "rate x 30"),
    (partial(encoder, optimizer=_adam), rate(100, lasts=3), _R, "rate x 100 for 3 steps"),
    (vae, rate(100, lasts=1), _R, "rate x 100 for a step"),
    (recommender, rate(200), _R, "rate x 200"),
    (partial(mlp, optimizer=_adam), scaled_weight("2.weight", 12), _W, "a matrix x 12"),
    (mlp, scaled_weight("2.weight", 60, 5), _W, "a row x 60"),
    (partial(lstm, lr=1e-2), scaled_weight("", 0.1), _W, "all weights x 0.1"),
    (decoder, scaled_weight("", 0.1), _W, "all weights x 0.1"),
    (
        recommender,
        _both(scaled_weight("item.weight", 300, 7, when=70), lambda t, s: _wide(7)(t) if s >= AT else None),
        _W,
        "a row x 300, used 20 steps later",
    ),
    (gru, scaled_weight("head.weight", 60, 1), _W, "a row x 60"),
    (decoder, scaled_weight("blocks.0.up.weight", 60, 4), _W, "a row x 60"),
    (cnn, scaled_weight("4.weight", -20), _W, "a convolution x -20"),
    (partial(encoder, lr=3e-3), scaled_weight("layers.layers.1.linear2.weight", 40), _W, "a matrix x 40"),
    (partial(lstm, optimizer=sgd, lr=0.02), scaled_weight("head.weight", 15), _W, "a matrix x 15"),
    (autoencoder, scaled_weight("0.2.weight", 0.01), _W, "a matrix x 0.01"),
    (denoiser, scaled_weight("3.weight", 0.02), _W, "a convolution x 0.02"),
    (gan, scaled_weight("generator.2.weight", 25), _W, "a matrix of the generator x 25"),
    (vae, scaled_weight("decode.2.weight", 20), _W, "a matrix x 20"),
    (decoder, scaled_weight("blocks.1.qkv.weight", 60), _A, "queries and keys x 60"),
    (
        partial(encoder, lr=3e-3),
        scaled_weight("layers.layers.0.self_attn.in_proj_weight", 60),
        _A,
        "queries and keys x 60",
    ),
    (mlp, spoilt_state("exp_avg_sq", 1e-9), _O, "second moment x 1e-9"),
    (decoder, spoilt_state("exp_avg", 300), _O, "first moment x 300"),
    (partial(mlp, optimizer=sgd, lr=0.01), spoilt_state("momentum_buffer", 300), _O, "momentum x 300"),
    (partial(lstm, optimizer=sgd, lr=0.02), spoilt_gradients(500), _G, "gradients x 500 before the step"),
    (cnn, scaled_loss(100), _L, "loss x 100"),
    (recommender, at(_summed), _L, "loss summed over the samples"),
    (mlp, scaled_gradient("2", 500), ("gradient",), "gradient of a layer x 500"),
    (decoder, scaled_gradient("blocks.0.down", 500), ("gradient",), "gradient of a layer x 500"),
)
JUMPS = tuple(
    Planted(f"{getattr(make, 'func', make).__name__}, {what}", make, plant, causes, seed=place)
    for place, (make, plant, causes, what) in enumerate(_PLANTED)
)


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

# Plain networks, also with a learning rate as high as they bear and nearly without noise, where a loss ends near zero.
_PLAIN = (
    mlp,
    partial(mlp, optimizer=sgd, lr=0.02),
    partial(mlp, lr=1e-2, noise=0.02),
    blobs,
    cnn,
    partial(cnn, optimizer=sgd, lr=0.05),
    lstm,
    gru,
    encoder,
    decoder,
    partial(decoder, lr=1e-2),
    recommender,
    partial(recommender, binary=True, lr=1e-2),
    autoencoder,
    vae,
    gan,
    partial(gan, lr=5e-3),
    contrastive,
    partial(contrastive, optimizer=_adam, lr=3e-2),
    denoiser,
)
_PLAIN_HOWS: tuple[dict[str, Any], ...] = (
    {},
    {"schedule": _restarts, "evaluates": True},
    {"schedule": _one_cycle, "clips": 1.0},
    {"schedule": _falls, "accumulates": 2},
)
CALM = tuple(
    Healthy(
        f"{getattr(make, 'func', make).__name__} {i}, {how['schedule'].__name__.strip('_') if how else 'constant'}",
        make,
        {**how, "seed": 100 + 4 * i + j},
    )
    for i, make in enumerate(_PLAIN)
    for j, how in enumerate(_PLAIN_HOWS)
)
