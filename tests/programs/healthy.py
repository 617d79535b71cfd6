"""Healthy programs: their results are finite, so a watch should say nothing and change nothing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .case import Setup

HEALTHY: dict[str, Callable[[], Setup]] = {}
INF = float("inf")


def healthy(make: Callable[[], Setup]) -> Callable[[], Setup]:
    """Enter a program under the name of its function."""
    HEALTHY[make.__name__] = make
    return make


def squares(output: Tensor) -> Tensor:
    return output.float().square().mean()


class Call(nn.Module):
    """A function of some layers and the inputs."""

    def __init__(self, function: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)

    def forward(self, *args: Tensor) -> Tensor:
        return self.function(*self.layers, *args)


@healthy
def transformer_encoder() -> Setup:
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True), 2)
    return Setup(model, (torch.randn(2, 5, 16),), loss=squares, steps=3)


@healthy
def causal_mask_of_pytorch() -> Setup:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    return Setup(layer, (torch.randn(2, 5, 16), mask), loss=squares, steps=2)


@healthy
def causal_mask_by_hand() -> Setup:
    def forward(qkv: nn.Module, softmax: nn.Module, x: Tensor) -> Tensor:
        q, k, v = qkv(x).chunk(3, -1)
        mask = torch.full((5, 5), -INF).triu(1)
        return softmax(q @ k.mT / 4 + mask) @ v

    return Setup(Call(forward, nn.Linear(8, 24), nn.Softmax(-1)), (torch.randn(2, 5, 8),), loss=squares)


@healthy
def mask_as_a_buffer() -> Setup:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(attend: nn.Module, x: Tensor) -> Tensor:
        return attend(x, x, x, attn_mask=model.mask)[0]

    model = Call(forward, attention)
    model.register_buffer("mask", torch.full((5, 5), -INF).triu(1))
    return Setup(model, (torch.randn(2, 5, 8),), loss=squares, steps=2)


@healthy
def causal_mask_with_alibi() -> Setup:
    def forward(attend: nn.Module, x: Tensor) -> Tensor:
        bias = -(torch.arange(5)[:, None] - torch.arange(5)).abs() * 0.5
        mask = bias.masked_fill(torch.ones(5, 5).triu(1).bool(), -INF)
        return attend(x, x, x, attn_mask=mask)[0]

    return Setup(Call(forward, nn.MultiheadAttention(8, 2, batch_first=True)), (torch.randn(2, 5, 8),))


@healthy
def classes_that_are_not_allowed() -> Setup:
    def forward(head: nn.Module, loss: nn.Module, x: Tensor) -> Tensor:
        logits = head(x).masked_fill(torch.tensor([False, False, False, True]), -INF)
        return loss(logits, torch.zeros(len(x), dtype=torch.long))

    return Setup(Call(forward, nn.Linear(8, 4), nn.CrossEntropyLoss()), (torch.randn(2, 8),), loss=squares)


@healthy
def padding_before_a_maximum() -> Setup:
    model = nn.Sequential(nn.ConstantPad1d(1, -INF), nn.MaxPool1d(3, 1), nn.Flatten(), nn.Linear(8, 1))
    return Setup(model, (torch.randn(2, 1, 8),), loss=squares)


@healthy
def gru_of_packed_sequences() -> Setup:
    def forward(gru: nn.Module, head: nn.Module, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True)
        return head(gru(packed)[1][-1])

    model = Call(forward, nn.GRU(4, 8, batch_first=True), nn.Linear(8, 1))
    return Setup(model, (torch.randn(3, 5, 4),), loss=squares, steps=3)


@healthy
def convolutions_with_batch_norm() -> Setup:
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model = nn.Sequential(*layers, nn.Linear(4, 2))
    adam = torch.optim.AdamW
    return Setup(
        model,
        (torch.randn(4, 1, 8, 8),),
        loss=squares,
        steps=4,
        optimizer=lambda model: adam(model.parameters()),
    )


@healthy
def autocast_in_bfloat16() -> Setup:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 2))
    return Setup(model, (torch.randn(4, 8),), autocast=torch.bfloat16, loss=squares, steps=3)


@healthy
def half_weights_in_range() -> Setup:
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2)).half()
    return Setup(model, (torch.randn(4, 8).half(),))


@healthy
def tied_embedding() -> Setup:
    embed, head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
    head.weight = embed.weight
    model = nn.Sequential(embed, nn.Tanh(), head)
    return Setup(model, (torch.arange(6).view(2, 3),), loss=squares, steps=3)


@healthy
def activation_checkpointing() -> Setup:
    def forward(first: nn.Module, second: nn.Module, x: Tensor) -> Tensor:
        return second(checkpoint(first, x, use_reentrant=False))

    first = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh())
    return Setup(Call(forward, first, nn.Linear(8, 1)), (torch.randn(4, 8),), loss=squares, steps=3)


@healthy
def maximum_from_minus_infinity() -> Setup:
    def forward(linear: nn.Module, x: Tensor) -> Tensor:
        best = torch.full((len(x), 4), -INF)
        for part in x.unbind(1):
            best = torch.maximum(best, linear(part))
        return best

    return Setup(Call(forward, nn.Linear(8, 4)), (torch.randn(2, 3, 8),), loss=squares)


@healthy
def beam_scores() -> Setup:
    def forward(head: nn.Module, x: Tensor) -> Tensor:
        scores = torch.tensor([0.0, -INF, -INF])[:, None] + F.log_softmax(head(x), -1)
        return scores.view(-1).topk(3).values

    return Setup(Call(forward, nn.Linear(4, 6)), (torch.randn(3, 4),))


@healthy
def two_optimizers() -> Setup:
    generator, critic = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1))
    model = nn.ModuleDict({"generator": generator, "critic": critic})
    steps = [torch.optim.Adam(part.parameters()) for part in (generator, critic)]

    def loop() -> list[Tensor]:
        losses = []
        for sign, optimizer in zip((1, -1, 1, -1), steps * 2, strict=True):
            optimizer.zero_grad()
            loss = sign * critic(generator(torch.randn(3, 4))).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    return Setup(model, loop=loop)


@healthy
def steps_that_a_scaler_skips() -> Setup:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=10)

    def loop() -> list[Tensor]:
        for _ in range(12):
            optimizer.zero_grad()
            scaler.scale(squares(model(torch.full((2, 4), 100.0)))).backward()
            scaler.step(optimizer)
            scaler.update()
        return [p.detach() for p in model.parameters()]

    return Setup(model, loop=loop)


@healthy
def evaluation_between_steps() -> Setup:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def loop() -> list[Tensor]:
        for _ in range(4):
            optimizer.zero_grad()
            squares(model(torch.randn(6, 4))).backward()
            optimizer.step()
            model.eval()
            with torch.inference_mode():
                model(torch.randn(2, 4))
            model.train()
        return [p.detach() for p in model.parameters()]

    return Setup(model, loop=loop)


@healthy
def double_backward() -> Setup:
    def forward(critic: nn.Module, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(critic(x).sum(), x, create_graph=True)
        return gradient.square().sum(-1).add(1e-8).sqrt().sub(1)

    critic = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 1))
    return Setup(Call(forward, critic), (torch.randn(3, 4),), loss=squares, steps=2)
