"""Judge the audit of steps by healthy trainings: it has to be silent on all of them.

    python benchmarks/judge_updates.py              # all, about two minutes
    python benchmarks/judge_updates.py adam tied    # those whose names contain one of the words

A line for each finding, which is a false alarm, and the number of silent trainings. Each is small and seeded, makes 12
steps, and is audited at each of them, which is the strictest setting: `watch(updates=1)`.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from _update_models import (
    Experts,
    Image,
    Kahan,
    Language,
    Lion,
    Lookahead,
    Masters,
    Momentum,
    Normed,
    Recurrent,
    Sparse,
    Tasks,
    Tower,
    Unused,
    ZeroGain,
    lora,
    mlp,
    plain,
)
from _update_runs import (
    STEPS,
    Healthy,
    Parameters,
    compiled,
    compiled_step,
    gan,
    gan_by_one_function,
    reinforced,
    split,
    two_losses,
    unfrozen,
)
from torch import nn


def groups(model: nn.Module, decay: float = 0.1) -> list[dict[str, Any]]:
    """Return groups with weight decay for matrices alone."""
    own = list(model.parameters())
    return [
        {"params": [x for x in own if x.ndim > 1], "weight_decay": decay},
        {"params": [x for x in own if x.ndim <= 1], "weight_decay": 0.0},
    ]


def warm_up(steps: int) -> Callable[[torch.optim.Optimizer], Any]:
    """Return a schedule that begins at 0."""
    return lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / steps))


def trainings() -> Iterator[tuple[str, Healthy]]:
    """Yield all trainings, by name."""
    optim: Any = torch.optim
    yield from (
        (f"optimizer-{name}", Healthy(plain, make))
        for name, make in {
            "sgd": lambda own: optim.SGD(own, lr=0.1),
            "sgd-momentum": lambda own: optim.SGD(own, lr=0.1, momentum=0.9),
            "sgd-dampening": lambda own: optim.SGD(
                own, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=1e-4
            ),
            "sgd-nesterov": lambda own: optim.SGD(own, lr=0.1, momentum=0.9, nesterov=True),
            "sgd-nesterov-loop": lambda own: optim.SGD(
                own, lr=0.1, momentum=0.9, nesterov=True, foreach=False
            ),
            "sgd-fused": lambda own: optim.SGD(own, lr=0.1, momentum=0.9, fused=True),
            "sgd-foreach": lambda own: optim.SGD(own, lr=0.1, momentum=0.9, foreach=True),
            "adam": lambda own: optim.Adam(own),
            "adam-l2": lambda own: optim.Adam(own, weight_decay=0.1),
            "adam-amsgrad": lambda own: optim.Adam(own, amsgrad=True),
            "adam-fused": lambda own: optim.Adam(own, fused=True),
            "adam-foreach": lambda own: optim.Adam(own, foreach=True),
            "adam-tensor-lr": lambda own: optim.Adam(own, lr=torch.tensor(1e-3)),
            "adam-beta1-0": lambda own: optim.Adam(own, betas=(0.0, 0.99)),
            "adam-large-eps": lambda own: optim.Adam(own, eps=1.0),
            "adamw": lambda own: optim.AdamW(own),
            "adamw-decay": lambda own: optim.AdamW(own, weight_decay=0.5),
            "adamw-fused": lambda own: optim.AdamW(own, fused=True),
            "adamw-foreach": lambda own: optim.AdamW(own, foreach=True),
            "adamw-loop": lambda own: optim.AdamW(own, foreach=False),
            "adamw-maximize": lambda own: optim.AdamW(own, maximize=True),
            "adamw-tiny-lr": lambda own: optim.AdamW(own, lr=1e-7),
            "adamax": lambda own: optim.Adamax(own),
            "nadam": lambda own: optim.NAdam(own),
            "radam": lambda own: optim.RAdam(own),
            "adagrad": lambda own: optim.Adagrad(own),
            "adadelta": lambda own: optim.Adadelta(own),
            "rmsprop": lambda own: optim.RMSprop(own),
            "rmsprop-centered": lambda own: optim.RMSprop(own, centered=True, momentum=0.9),
            "rprop": lambda own: optim.Rprop(own),
            "asgd": lambda own: optim.ASGD(own),
            "adafactor": lambda own: optim.Adafactor(own),
            "lion": lambda own: Lion(own),
            "lion-decay": lambda own: Lion(own, weight_decay=0.1),
            "lookahead": lambda own: Lookahead(optim.SGD(own, lr=0.1)),
        }.items()
    )
    yield "optimizer-lbfgs", Healthy(plain, lambda own: optim.LBFGS(own, max_iter=3), closure=True)
    yield "optimizer-closure-sgd", Healthy(plain, lambda own: optim.SGD(own, lr=0.1), closure=True)
    yield "optimizer-closure-adam", Healthy(mlp, closure=True)
    yield (
        "optimizer-sparse-adam",
        Healthy(
            Sparse,
            lambda own: optim.SparseAdam(own),
            parameters=lambda model: model.embed.parameters(),
            before=lambda model: model.head.requires_grad_(False),
        ),
    )
    yield "optimizer-sparse-sgd", Healthy(Sparse, lambda own: optim.SGD(own, lr=0.1))
    yield "optimizer-muon-and-adamw", Healthy(plain, run=split)
    yield "optimizer-nothing-set-to-none", Healthy(mlp, set_to_none=False)
    for name, make in {"mlp": mlp, "image": Image, "language": Language, "recurrent": Recurrent}.items():
        yield f"model-{name}", Healthy(make)
        yield f"model-{name}-sgd", Healthy(make, lambda own: optim.SGD(own, lr=0.05, momentum=0.9))
        yield f"model-{name}-evaluated", Healthy(make, evaluate=True)
        yield f"model-{name}-clipped", Healthy(make, clip=0.1)
        yield f"model-{name}-accumulated", Healthy(make, accumulate=4)
        if name != "recurrent":  # oneDNN has no such LSTM on every CPU
            yield f"model-{name}-bfloat16-autocast", Healthy(make, autocast=torch.bfloat16)
        yield f"model-{name}-warm-up", Healthy(make, scheduler=warm_up(8))
    yield "model-regression", Healthy(plain, classes=False)
    yield "model-normed", Healthy(Normed)
    yield "model-zero-gains", Healthy(ZeroGain)
    yield "model-zero-gains-warm-up", Healthy(ZeroGain, scheduler=warm_up(20))
    yield "model-zero-gains-sgd", Healthy(ZeroGain, lambda own: optim.SGD(own, lr=0.1))
    yield "model-unused-pooler", Healthy(Unused)
    yield "model-tasks-in-turn", Healthy(Tasks)
    yield "model-float64", Healthy(plain, dtype=torch.float64)
    yield "model-checkpointed", Healthy(lambda: Language(checkpointed=True))
    yield "tied", Healthy(lambda: Language(tied=True))
    yield "tied-sgd", Healthy(lambda: Language(tied=True), lambda own: optim.SGD(own, lr=0.1))
    yield (
        "tied-checkpointed-accumulated",
        Healthy(lambda: Language(tied=True, checkpointed=True), accumulate=2),
    )
    yield "lora", Healthy(lora)
    yield "lora-decay", Healthy(lora, lambda own: optim.AdamW(own, weight_decay=0.1))
    yield "lora-warm-up", Healthy(lora, scheduler=warm_up(8))
    yield "lora-sgd", Healthy(lora, lambda own: optim.SGD(own, lr=0.1))
    yield "lora-autocast", Healthy(lora, autocast=torch.bfloat16)
    yield "lora-all-parameters", Healthy(lora, parameters=lambda model: model.parameters())
    for frozen in ("frozen", "evaluated", "no-grad"):
        make_tower = lambda frozen=frozen: Tower(no_grad=frozen == "no-grad", evaluated=frozen != "frozen")  # noqa: E731
        yield f"tower-{frozen}", Healthy(make_tower)
        yield (
            f"tower-{frozen}-all-parameters",
            Healthy(make_tower, parameters=lambda model: model.parameters()),
        )
        yield (
            f"tower-{frozen}-decay",
            Healthy(
                make_tower,
                lambda own: optim.SGD(own, lr=0.1, momentum=0.9, weight_decay=0.1),
                parameters=lambda model: model.parameters(),
                set_to_none=False,
            ),
        )
    yield "tower-unfrozen-later", Healthy(mlp, run=unfrozen)
    for kind in ("called", "empty", "dense"):
        for top in (1, 2):
            yield f"experts-{kind}-top-{top}", Healthy(lambda kind=kind, top=top: Experts(top=top, kind=kind))
    yield "experts-sixteen", Healthy(lambda: Experts(16))
    yield "experts-sgd", Healthy(Experts, lambda own: optim.SGD(own, lr=0.1, momentum=0.9), set_to_none=False)
    yield "experts-accumulated", Healthy(Experts, accumulate=2)
    for needs_grad in (False, True):
        yield (
            f"teacher-{needs_grad}",
            Healthy(
                lambda needs_grad=needs_grad: Momentum(needs_grad=needs_grad),
                parameters=lambda model: model.student.parameters(),
                after=lambda model, step: model.follow(),
            ),
        )
    yield (
        "teacher-all-parameters",
        Healthy(
            Momentum, parameters=lambda model: model.parameters(), after=lambda model, step: model.follow()
        ),
    )
    yield "average-of-weights", Healthy(mlp, after=_averager())
    yield (
        "decay-groups",
        Healthy(
            Image,
            lambda own: optim.AdamW(groups(_holder(own)), lr=1e-3),
            parameters=lambda model: model.parameters(),
        ),
    )
    yield "decay-groups-language", Healthy(Language, lambda own: optim.AdamW(groups(_holder(own)), lr=1e-3))
    yield (
        "decay-groups-sgd",
        Healthy(Image, lambda own: optim.SGD(groups(_holder(own)), lr=0.1, momentum=0.9)),
    )
    yield (
        "rates-by-layer",
        Healthy(
            mlp, lambda own: optim.AdamW([{"params": [x], "lr": 1e-3 / (i + 1)} for i, x in enumerate(own)])
        ),
    )
    yield (
        "schedule-cosine",
        Healthy(mlp, scheduler=lambda o: optim.lr_scheduler.CosineAnnealingLR(o, STEPS - 1)),
    )
    yield "schedule-to-0", Healthy(mlp, scheduler=lambda o: optim.lr_scheduler.LinearLR(o, 1.0, 0.0, STEPS))
    yield (
        "schedule-one-cycle",
        Healthy(mlp, scheduler=lambda o: optim.lr_scheduler.OneCycleLR(o, 0.01, total_steps=20)),
    )
    yield "schedule-steps", Healthy(mlp, scheduler=lambda o: optim.lr_scheduler.StepLR(o, 3, 0.1))
    yield "schedule-warm-up-sgd", Healthy(plain, lambda own: optim.SGD(own, lr=0.1), scheduler=warm_up(10))
    yield "clip-value", Healthy(mlp, clip_value=0.01)
    yield "clip-large", Healthy(mlp, clip=1e6)
    yield "clip-infinite", Healthy(mlp, clip=float("inf"))
    yield "clip-accumulated", Healthy(mlp, clip=0.01, accumulate=3)
    for scale in (128.0, 65536.0, 2.0**127):
        yield f"scaler-{scale:.3g}", Healthy(mlp, autocast=torch.bfloat16, scaler=scale)
        yield f"scaler-{scale:.3g}-clipped", Healthy(plain, autocast=torch.bfloat16, scaler=scale, clip=0.1)
        yield (
            f"scaler-{scale:.3g}-accumulated",
            Healthy(plain, autocast=torch.bfloat16, scaler=scale, accumulate=2),
        )
    yield (
        "scaler-fused",
        Healthy(
            plain, lambda own: optim.AdamW(own, lr=1e-3, fused=True), autocast=torch.bfloat16, scaler=1024.0
        ),
    )
    yield "bfloat16-large-rate", Healthy(plain, lambda own: optim.AdamW(own, lr=1e-2), dtype=torch.bfloat16)
    yield "bfloat16-sgd", Healthy(plain, lambda own: optim.SGD(own, lr=1.0), dtype=torch.bfloat16)
    yield "bfloat16-kahan", Healthy(plain, lambda own: Kahan(own, lr=1e-3), dtype=torch.bfloat16)
    yield "bfloat16-masters", Healthy(plain, Masters, dtype=torch.bfloat16)
    yield (
        "bfloat16-warm-up",
        Healthy(plain, lambda own: optim.AdamW(own, lr=1e-2), dtype=torch.bfloat16, scheduler=warm_up(40)),
    )
    yield "gan", Healthy(plain, run=gan)
    yield "gan-by-one-function", Healthy(plain, run=gan_by_one_function)
    yield "gan-critics", Healthy(plain, run=lambda one: gan(one, critics=5))
    yield "gan-generator-alone", Healthy(plain, run=lambda one: gan(one, apart=True))
    yield "compiled-model", Healthy(plain, run=compiled)
    yield "compiled-step", Healthy(plain, run=compiled_step)
    yield "two-losses", Healthy(plain, run=two_losses)
    yield "policy-and-target", Healthy(plain, run=reinforced)


def _holder(own: Parameters) -> nn.Module:
    return nn.ParameterList(own)


def _averager() -> Callable[[nn.Module, int], object]:
    kept: dict[int, torch.optim.swa_utils.AveragedModel] = {}

    def follow(model: nn.Module, step: int) -> None:
        kept.setdefault(id(model), torch.optim.swa_utils.AveragedModel(model)).update_parameters(model)

    return follow


def main(words: list[str]) -> int:
    """Run the chosen trainings, and return the number of false alarms."""
    chosen = [(name, one) for name, one in trainings() if not words or any(word in name for word in words)]
    alarms = 0
    for name, one in chosen:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = one.train()
        broken = [str(one.message) for one in told if "audits no more" in str(one.message)]
        alarms += bool(found or broken)
        for line in chain(map(str, found), broken):
            print(f"{name}: {line}", flush=True)
    print(f"{len(chosen) - alarms} of {len(chosen)} healthy trainings are silent")
    return alarms


if __name__ == "__main__":
    sys.exit(bool(main(sys.argv[1:])))
