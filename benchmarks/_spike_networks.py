"""Small networks of plain PyTorch for `judge_spikes.py`, each with its data, its loss and its optimizer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from _spike_training import Batch, Loss, Training
from torch import Tensor, nn
from torch.nn import functional

SAMPLES = 32


def sgd(parameters: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


Optimizer = Callable[..., torch.optim.Optimizer]


def _training(
    model: nn.Module,
    draw: Callable[[torch.Generator], Batch],
    loss: Loss,
    lr: float,
    optimizer: Optimizer = torch.optim.AdamW,
) -> Training:
    def drawn(step: int) -> Batch:
        return draw(torch.Generator().manual_seed(step))

    return Training(model.train(), drawn, [(loss, optimizer(model.parameters(), lr=lr))])


def _square(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().flatten(1).mean(1)


def _classes(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def mlp(lr: float = 3e-3, optimizer: Optimizer = torch.optim.AdamW, noise: float = 0.3) -> Training:
    """A regression of products of inputs."""

    def draw(rng: torch.Generator) -> Batch:
        x = torch.randn(SAMPLES, 8, generator=rng)
        y = x[:, :4].sum(1, keepdim=True) + x[:, 4:5] * x[:, 5:6]
        return {"x": x, "y": y + noise * torch.randn(SAMPLES, 1, generator=rng)}

    net = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 1))
    return _training(net, draw, _square, lr, optimizer)


def blobs(lr: float = 3e-3, optimizer: Optimizer = torch.optim.Adam) -> Training:
    """A classifier with batch norm and dropout."""
    centres = 1.2 * torch.randn(5, 12, generator=torch.Generator().manual_seed(7))

    def draw(rng: torch.Generator) -> Batch:
        y = torch.randint(0, 5, (SAMPLES,), generator=rng)
        return {"x": centres[y] + torch.randn(SAMPLES, 12, generator=rng), "y": y}

    net = nn.Sequential(
        nn.Linear(12, 32),
        nn.BatchNorm1d(32),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Linear(32, 32),
        nn.GELU(),
        nn.Linear(32, 5),
    )
    return _training(net, draw, _classes, lr, optimizer)


def _pictures(rng: torch.Generator) -> Batch:
    y = torch.randint(0, 4, (SAMPLES,), generator=rng)
    x = 0.7 * torch.randn(SAMPLES, 1, 12, 12, generator=rng)
    for i, label in enumerate(y.tolist()):
        x[i, :, 6 * (label // 2) : 6 * (label // 2) + 6, 6 * (label % 2) : 6 * (label % 2) + 6] += 1
    return {"x": x, "y": y}


def cnn(lr: float = 3e-3, optimizer: Optimizer = torch.optim.AdamW) -> Training:
    net = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(2)),
        *(nn.Flatten(), nn.Linear(64, 4)),
    )
    return _training(net, _pictures, _classes, lr, optimizer)


class _Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 24, batch_first=True)
        self.head = nn.Linear(24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def lstm(lr: float = 3e-3, optimizer: Optimizer = torch.optim.AdamW) -> Training:
    def draw(rng: torch.Generator) -> Batch:
        x = torch.randn(SAMPLES, 8, 6, generator=rng)
        return {"x": x, "y": 0.4 * x.sum((1, 2))[:, None]}

    return _training(_Lstm(), draw, _square, lr, optimizer)


class _Gru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.gru = nn.GRU(16, 24, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.gru(self.embed(tokens))[0].mean(1))


def gru(lr: float = 5e-3, optimizer: Optimizer = torch.optim.Adam) -> Training:
    """A classifier of sequences by the most frequent third of the tokens."""

    def draw(rng: torch.Generator) -> Batch:
        y = torch.randint(0, 3, (SAMPLES,), generator=rng)
        own = 6 * y[:, None] + torch.randint(0, 6, (SAMPLES, 10), generator=rng)
        other = torch.randint(0, 20, (SAMPLES, 10), generator=rng)
        return {"x": torch.where(torch.rand(SAMPLES, 10, generator=rng) < 0.6, own, other), "y": y}

    return _training(_Gru(), draw, _classes, lr, optimizer)


class _Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(5, 24)
        self.layers = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(24, 4, 48, dropout=0.05, batch_first=True),
            2,
            enable_nested_tensor=False,
        )
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.into(x)).mean(1))


def encoder(lr: float = 1e-3, optimizer: Optimizer = torch.optim.AdamW) -> Training:
    """A classifier of series by their frequency."""

    def draw(rng: torch.Generator) -> Batch:
        y = torch.randint(0, 4, (SAMPLES,), generator=rng)
        times = torch.arange(12.0)[:, None] + torch.arange(5) + torch.rand(SAMPLES, 1, 1, generator=rng)
        x = torch.sin(0.5 * (y[:, None, None] + 1) * times)
        return {"x": x + 0.3 * torch.randn(SAMPLES, 12, 5, generator=rng), "y": y}

    return _training(_Encoder(), draw, _classes, lr, optimizer)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(24, 32), nn.Embedding(12, 32)
        self.blocks = nn.ModuleList(_Block(32, 4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 24, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def decoder(lr: float = 3e-3, optimizer: Optimizer = torch.optim.AdamW) -> Training:
    """A language model of sequences in which each token but some follows from the one before."""

    def draw(rng: torch.Generator) -> Batch:
        tokens = [torch.randint(0, 24, (SAMPLES,), generator=rng)]
        while len(tokens) < 12:
            other = torch.randint(0, 24, (SAMPLES,), generator=rng)
            tokens.append(
                torch.where(torch.rand(SAMPLES, generator=rng) < 0.05, other, (5 * tokens[-1] + 3) % 24)
            )
        x = torch.stack(tokens, 1)
        return {"x": x[:, :-1], "y": x[:, 1:]}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())

    return _training(_Decoder(), draw, loss, lr, optimizer)


class _Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(60, 8), nn.Embedding(80, 8)
        self.mlp = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        return self.mlp(torch.cat([self.user(users), self.item(items)], -1)).squeeze(-1)


def recommender(lr: float = 3e-3, optimizer: Optimizer = torch.optim.AdamW, binary: bool = False) -> Training:
    """Ratings of items by users. Item 7 is seen from the step `AT` on alone."""
    tastes = torch.Generator().manual_seed(3)
    ratings = torch.randn(60, 3, generator=tastes) @ torch.randn(3, 80, generator=tastes)

    def draw(rng: torch.Generator) -> Batch:
        users, items = (torch.randint(0, most, (2 * SAMPLES,), generator=rng) for most in (60, 80))
        items[items == 7] = 8
        return {"users": users, "items": items}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        wanted = ratings[batch["users"], batch["items"]]
        found = model(batch["users"], batch["items"])
        if binary:
            return functional.binary_cross_entropy_with_logits(found, (wanted > 0).float(), reduction="none")
        return (found - wanted * batch.get("scale", torch.ones(()))).square()

    return _training(_Recommender(), draw, loss, lr, optimizer)


class _Variational(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
        self.decode = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, spread = self.encode(x).chunk(2, -1)
        return self.decode(mean + torch.randn_like(mean) * (0.5 * spread).exp()), mean, spread


def _factors(rng: torch.Generator) -> Batch:
    mixing = torch.randn(4, 16, generator=torch.Generator().manual_seed(5))
    x = torch.randn(SAMPLES, 4, generator=rng) @ mixing
    return {"x": x + 0.1 * torch.randn(SAMPLES, 16, generator=rng)}


def vae(lr: float = 3e-3, optimizer: Optimizer = torch.optim.Adam) -> Training:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        found, mean, spread = model(batch["x"])
        distance = 0.5 * (mean.square() + spread.exp() - 1 - spread).sum(1)
        return (found - batch["x"]).square().sum(1) + 0.5 * distance

    return _training(_Variational(), _factors, loss, lr, optimizer)


def autoencoder(lr: float = 3e-3, optimizer: Optimizer = torch.optim.AdamW) -> Training:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return (model(batch["x"]) - batch["x"]).square().mean(1)

    net = nn.Sequential(
        nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 4)),
        nn.Sequential(nn.Linear(4, 32), nn.SiLU(), nn.Linear(32, 16)),
    )
    return _training(net, _factors, loss, lr, optimizer)


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 6))
        self.critic = nn.Sequential(nn.Linear(6, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))


def gan(lr: float = 1e-3, optimizer: Optimizer = torch.optim.Adam) -> Training:
    """A generator and a discriminator of Gaussian points, with an optimizer and a loss each."""
    model = _Pair()

    def draw(step: int) -> Batch:
        rng = torch.Generator().manual_seed(step)
        x = torch.randn(SAMPLES, 6, generator=rng) * torch.linspace(0.5, 2, 6) + 1
        return {"x": x, "z": torch.randn(SAMPLES, 4, generator=rng)}

    def critic(_: nn.Module, batch: Batch) -> Tensor:
        real, false = model.critic(batch["x"]), model.critic(model.generator(batch["z"]).detach())
        return (functional.softplus(-real) + functional.softplus(false)).flatten()

    def generator(_: nn.Module, batch: Batch) -> Tensor:
        return functional.softplus(-model.critic(model.generator(batch["z"]))).flatten()

    parts = [(critic, model.critic), (generator, model.generator)]
    return Training(model, draw, [(loss, optimizer(part.parameters(), lr=lr)) for loss, part in parts])


class _Twins(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(12, 16), nn.Linear(10, 16)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        a, b = functional.normalize(self.image(x), dim=-1), functional.normalize(self.text(text), dim=-1)
        return self.scale.exp() * a @ b.T


def contrastive(lr: float = 3e-3, optimizer: Optimizer = torch.optim.AdamW) -> Training:
    def draw(rng: torch.Generator) -> Batch:
        mix = torch.Generator().manual_seed(9)
        z = torch.randn(SAMPLES, 6, generator=rng)
        return {k: z @ torch.randn(6, n, generator=mix) for k, n in (("x", 12), ("text", 10))}

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return functional.cross_entropy(
            model(batch["x"], batch["text"]), batch.get("y", torch.arange(SAMPLES)), reduction="none"
        )

    return _training(_Twins(), draw, loss, lr, optimizer)


def denoiser(lr: float = 2e-3, optimizer: Optimizer = torch.optim.AdamW) -> Training:
    """A convolutional network that takes noise off pictures, as a diffusion model does."""

    def draw(rng: torch.Generator) -> Batch:
        clean = _pictures(rng)["x"]
        return {
            "x": clean + 0.5 * torch.randn(clean.shape, generator=rng),
            "y": functional.avg_pool2d(clean, 3, 1, 1),
        }

    net = nn.Sequential(
        *(nn.Conv2d(1, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.SiLU()),
        *(nn.Conv2d(12, 12, 3, padding=1), nn.SiLU(), nn.Conv2d(12, 1, 3, padding=1)),
    )
    return _training(net, draw, _square, lr, optimizer)
