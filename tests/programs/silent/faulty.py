"""21 faults that users report, each in a training of ordinary shape; `wrong` is False for its healthy twin."""

from __future__ import annotations

import contextlib

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from .kit import SGD, Adam, AdamW, Layers, Watching, batches, fault, mse, train, update, validate


@fault("missing-zero-grad")
def gan_leaves_gradients(watch: Watching, wrong: bool) -> None:
    generator, critic = Layers(), nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    of_generator, of_critic = Adam(generator.parameters(), lr=1e-3), Adam(critic.parameters(), lr=1e-3)
    bce, ones = nn.functional.binary_cross_entropy_with_logits, torch.ones(16, 1)
    with watch(nn.ModuleDict({"generator": generator, "critic": critic})):
        for _, x, real in batches():
            if not wrong:
                of_critic.zero_grad()
            made = generator(x)
            (bce(critic(real), ones) + bce(critic(made.detach()), 0 * ones)).backward()
            of_critic.step()
            if wrong:
                of_critic.zero_grad()
            of_generator.zero_grad()
            bce(critic(made), ones).backward()
            of_generator.step()


@fault("missing-zero-grad")
def closure_without_zero_grad(watch: Watching, wrong: bool) -> None:
    model = Layers()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    with watch(model):
        for _, x, y in batches(6):

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                if not wrong:
                    optimizer.zero_grad()
                loss = mse(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)


class Detaching(Layers):
    wrong = False

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        return self.head(features.detach() if self.wrong else features)


@fault("no-gradient")
def detached_in_a_compiled_model(watch: Watching, wrong: bool) -> None:
    model = Detaching()
    model.wrong = wrong
    with watch(model):
        compiled = torch.compile(model, backend="eager")
        train(model, AdamW(model.parameters(), lr=1e-3), compiled)


class Gated(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))
        self.gate, self.wrong = nn.Linear(8, 3), wrong

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        if self.wrong:
            scores = nn.functional.one_hot(scores.argmax(-1), 3).float()
        return (torch.stack([expert(x) for expert in self.experts], -1) @ scores.unsqueeze(-1)).squeeze(-1)


@fault("no-gradient")
def gate_behind_an_argmax(watch: Watching, wrong: bool) -> None:
    model = Gated(wrong)
    with watch(model):
        train(model, Adam(model.parameters(), lr=1e-3))


@fault("no-gradient", "not-in-optimizer")
def embedding_from_pretrained_is_frozen(watch: Watching, wrong: bool) -> None:
    embedding = nn.Embedding.from_pretrained(torch.randn(32, 16), freeze=wrong)
    model = nn.Sequential(embedding, nn.Flatten(), nn.Linear(64, 4))
    with watch(model):
        train(model, Adam(model.parameters(), lr=1e-2), lambda x: model((x * 8).long() % 32), inputs=4)


@fault("not-in-optimizer", "other-module-trained")
def optimizer_before_the_new_head(watch: Watching, wrong: bool) -> None:
    model = Layers()
    early = AdamW(model.parameters(), lr=1e-3)
    model.head = nn.Linear(16, 4)
    with watch(model):
        train(model, early if wrong else AdamW(model.parameters(), lr=1e-3))


@fault("not-in-optimizer")
def unfrozen_and_not_added(watch: Watching, wrong: bool) -> None:
    model = Layers()
    model.stem.requires_grad_(False)
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)

    def unfreeze(step: int) -> None:
        if step == 5:
            model.stem.requires_grad_(True)
            if not wrong:
                optimizer.add_param_group({"params": list(model.stem.parameters())})

    with watch(model):
        train(model, optimizer, after=unfreeze)


class Listed(nn.Module):
    def __init__(self, wrong: bool) -> None:
        super().__init__()
        layers = [nn.Linear(8, 8) for _ in range(3)]
        self.layers, self.head = layers if wrong else nn.ModuleList(layers), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x)


@fault("not-in-optimizer")
def layers_in_a_plain_list(watch: Watching, wrong: bool) -> None:
    model = Listed(wrong)
    with watch(model):
        train(model, Adam(model.parameters(), lr=1e-3))


@fault("not-stepped")
def schedule_counted_in_epochs_stepped_by_batch(watch: Watching, wrong: bool) -> None:
    model = Layers()
    optimizer = SGD(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=4 if wrong else 24)
    with watch(model):
        train(model, optimizer, steps=24, after=lambda step: schedule.step())


@fault("eval-mode-wrong", "train-mode-wrong")
def validation_in_training_mode(watch: Watching, wrong: bool) -> None:
    model = Layers(norm=nn.BatchNorm1d(16))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with watch(model):
        for _ in range(3):
            train(model.train(), optimizer, steps=5)
            validate(model.train(wrong))


@fault("not-unscaled", "clipping")
def clipped_before_unscale(watch: Watching, wrong: bool) -> None:
    model = Layers()
    optimizer = SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    with watch(model):
        for _, x, y in batches():
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = mse(model(x), y)
            scaler.scale(loss).backward()
            if not wrong:
                scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()


@fault("clipping", "zero-gradient")
def clip_of_zero_meant_none(watch: Watching, wrong: bool) -> None:
    model = Layers()
    optimizer, norm = AdamW(model.parameters(), lr=1e-3, weight_decay=0.0), 0.0 if wrong else 1.0
    with watch(model):
        train(model, optimizer, before=lambda step: clip_grad_norm_(model.parameters(), norm))


@fault("clipping")
def clipped_after_the_step(watch: Watching, wrong: bool) -> None:
    model = Layers()
    optimizer = SGD(model.parameters(), lr=0.05)

    def clip(step: int) -> None:
        clip_grad_norm_(model.parameters(), 1.0)

    with watch(model):
        train(model, optimizer, factor=100.0, **{"after" if wrong else "before": clip})  # type: ignore[arg-type]


@fault("accumulation")
def token_means_of_unequal_batches(watch: Watching, wrong: bool) -> None:
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(5)
    with watch(model):
        for _ in range(8):
            optimizer.zero_grad()
            tokens = torch.randint(16, (3, 4, 12), generator=generator)
            labels = tokens.roll(-1, -1)
            for micro, length in enumerate((12, 10, 9)):
                labels[micro, :, length:] = -100
            count = int((labels != -100).sum())
            for x, y in zip(tokens, labels, strict=True):
                loss = cross_entropy(model(x).flatten(0, 1), y.flatten())
                (loss / 3 if wrong else loss * (int((y != -100).sum()) / count)).backward()
            optimizer.step()


@fault("accumulation", "missing-zero-grad", "gradients-dropped")
def zeroed_at_each_micro_batch(watch: Watching, wrong: bool) -> None:
    model = Layers()
    optimizer = SGD(model.parameters(), lr=0.05)
    with watch(model):
        for step, x, y in batches(24):
            if wrong or step % 4 == 0:
                optimizer.zero_grad()
            (mse(model(x), y) / 4).backward()
            if step % 4 == 3:
                optimizer.step()


@fault("not-reduced", ranks=2)
def no_sync_is_never_left(watch: Watching, wrong: bool) -> None:
    wrapped = DistributedDataParallel(Layers())
    optimizers = [SGD(x.parameters(), lr=0.05) for x in (wrapped.module.stem, wrapped.module.head)]
    with watch(wrapped):
        for step, x, y in batches():
            x, y = (tensor[dist.get_rank() :: 2] for tensor in (x, y))
            is_last = step % 2 == 1 and not wrong
            with contextlib.nullcontext() if is_last else wrapped.no_sync():
                (mse(wrapped(x), y) / 2).backward()
            if step % 2:
                optimizers[step // 2 % 2].step()
                wrapped.zero_grad()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Embedding(16, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(self.embed(x))))


@fault("tie-broken", "not-in-optimizer")
def best_weights_put_back_one_by_one(watch: Watching, wrong: bool) -> None:
    model = Tied()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    generator = torch.Generator().manual_seed(5)
    with watch(model):
        for step in range(12):
            if step == 6 and wrong:
                for name, tensor in best.items():
                    owner, _, leaf = name.rpartition(".")
                    setattr(model.get_submodule(owner), leaf, nn.Parameter(tensor))
                optimizer = AdamW(model.parameters(), lr=1e-2)
            elif step == 6:
                model.load_state_dict(best)
            tokens = torch.randint(16, (4, 12), generator=generator)
            update(optimizer, cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, -1).flatten()))


@fault("absorbed")
def momentum_steps_below_bfloat16(watch: Watching, wrong: bool) -> None:
    model = Layers().to(torch.bfloat16 if wrong else torch.float32)
    with watch(model):
        optimizer = SGD(model.parameters(), lr=1e-4, momentum=0.9)
        train(model, optimizer, lambda x: model(x.to(model.head.weight.dtype)).float())


@fault("frozen-moved")
def frozen_tower_keeps_its_statistics_moving(watch: Watching, wrong: bool) -> None:
    tower = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU()).requires_grad_(False)
    model = nn.Sequential(tower.train(wrong), nn.Linear(16, 4))
    with watch(model):
        train(model, AdamW(model[1].parameters(), lr=1e-3))


@fault("frozen-moved")
def momentum_moves_what_was_frozen(watch: Watching, wrong: bool) -> None:
    model = Layers()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)

    def clear(step: int) -> bool:
        model.stem.requires_grad_(step < 6)
        optimizer.zero_grad(set_to_none=not wrong)
        return False

    with watch(model):
        train(model, optimizer, zero=clear)


@fault("zero-gradient", "no-gradient")
def layer_of_dead_units(watch: Watching, wrong: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    nn.init.constant_(model[1].bias, -20.0 if wrong else 0.0)
    with watch(model):
        train(model, Adam(model.parameters(), lr=1e-3))
