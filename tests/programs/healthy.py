"""Healthy programs with infinities that are meant: a watch should say nothing and change nothing.

Plain trainings are in `silent`, and in tests/integration/test_noninterference.py on real architectures.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from support.toys import Does

from .case import Setup

HEALTHY: dict[str, Callable[[], Setup]] = {}
INF = float("inf")


def healthy(make: Callable[[], Setup]) -> Callable[[], Setup]:
    """Enter a program under the name of its function."""
    HEALTHY[make.__name__] = make
    return make


def squares(output: Tensor) -> Tensor:
    return output.float().square().mean()


@healthy
def causal_mask_of_pytorch() -> Setup:
    layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(5)
    return Setup(layer, (torch.randn(2, 5, 16), mask), loss=squares, steps=2)


@healthy
def mask_as_a_buffer() -> Setup:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(attend: nn.Module, x: Tensor) -> Tensor:
        return attend(x, x, x, attn_mask=model.mask)[0]

    model = Does(forward, attention)
    model.register_buffer("mask", torch.full((5, 5), -INF).triu(1))
    return Setup(model, (torch.randn(2, 5, 8),), loss=squares, steps=2)


@healthy
def gru_of_packed_sequences() -> Setup:
    def forward(gru: nn.Module, head: nn.Module, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True)
        return head(gru(packed)[1][-1])

    model = Does(forward, nn.GRU(4, 8, batch_first=True), nn.Linear(8, 1))
    return Setup(model, (torch.randn(3, 5, 4),), loss=squares, steps=3)


@healthy
def maximum_from_minus_infinity() -> Setup:
    def forward(linear: nn.Module, x: Tensor) -> Tensor:
        best = torch.full((len(x), 4), -INF)
        for part in x.unbind(1):
            best = torch.maximum(best, linear(part))
        return best

    return Setup(Does(forward, nn.Linear(8, 4)), (torch.randn(2, 3, 8),), loss=squares)


@healthy
def beam_scores() -> Setup:
    def forward(head: nn.Module, x: Tensor) -> Tensor:
        scores = torch.tensor([0.0, -INF, -INF])[:, None] + F.log_softmax(head(x), -1)
        return scores.view(-1).topk(3).values

    return Setup(Does(forward, nn.Linear(4, 6)), (torch.randn(3, 4),))


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
