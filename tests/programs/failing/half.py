"""Values that leave a 16-bit format, vanish or are rounded in it, and would not in float32."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from programs.case import PRODUCTS, Setup, failure, sequence


class DenseReluDense(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.wi = nn.Linear(width, inner, bias=False)
        self.wo = nn.Linear(inner, width, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.wi(x))
        h = self.dropout(h)
        return self.wo(h)  # culprit: t5_wo


class Residual(nn.Module):
    def __init__(self, width: int, part: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.part = part

    def forward(self, x: Tensor) -> Tensor:
        return x + self.part(self.norm(x))


@failure(module="part.wo", value="inf", operations=PRODUCTS)
def t5_wo() -> Setup:
    """The down projection of a feed-forward sums past 65504 in float16 (T5's `wo`)."""
    model = Residual(32, DenseReluDense(32, 128))
    with torch.no_grad():
        model.part.wi.weight.mul_(2000)
        model.part.wo.weight.mul_(100)
    return Setup(model.half(), (torch.randn(2, 8, 32).half(),))


class ScaledEmbedding(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        h = h * self.embed.embedding_dim**0.5  # culprit: embedding_scale
        return self.norm(h)


@failure(module="norm", label="input[0]", origin="received", source_module="", value="inf", operations="mul")
def embedding_scale() -> Setup:
    """Token embeddings times sqrt(width) leave float16."""
    model = ScaledEmbedding(50, 256)
    with torch.no_grad():
        model.embed.weight[7, 3] = 6000.0  # the outlier feature of a token that begins every text
    return Setup(model.half(), (torch.tensor([[7, 2, 9]]),))


class ResidualStream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(16))
        self.up = nn.Linear(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        stream = x * self.scale
        return self.up(stream)  # culprit: autocast_cast


@failure(module="up", value="inf", operations="_to_copy")
def autocast_cast() -> Setup:
    """Autocast casts a float32 residual stream with values above 65504 to float16."""
    model = ResidualStream()
    model.scale[5] = 4e4  # a massive activation in one channel
    return Setup(model, (torch.randn(8, 16) * 2,), autocast=torch.float16)


class Rounded(nn.Module):
    def forward(self, logits: Tensor) -> Tensor:
        p = torch.sigmoid(logits)
        return -torch.log(1 - p).mean()  # culprit: bfloat16_rounding


@failure(module="loss", value="inf", operations="log")
def bfloat16_rounding() -> Setup:
    """A probability of 0.999 is rounded to 1 in bfloat16, and log(1 - p) is taken."""
    model = sequence(score=nn.Linear(8, 1), loss=Rounded())
    nn.init.constant_(model.score.bias, 7.0)
    return Setup(model.bfloat16(), (torch.randn(16, 8).bfloat16(),))
