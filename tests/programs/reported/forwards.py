"""Models rebuilt from public reports that fail in the forward, or in a loss. Their code is our own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from programs.case import Setup, failure, summed


class DiceLoss(nn.Module):
    def forward(self, probs: Tensor, mask: Tensor) -> Tensor:
        overlap = (probs * mask).flatten(1).sum(1)
        total = probs.flatten(1).sum(1) + mask.flatten(1).sum(1)
        return 1 - 2 * overlap / total  # culprit: dice_empty


class Criterion(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dice = DiceLoss()

    def forward(self, probs: Tensor, mask: Tensor) -> Tensor:
        return self.dice(probs, mask).mean()


class TileSegmenter(nn.Module):
    def __init__(self, bands: int = 4) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(bands, 8, 3, padding=1, bias=False), nn.ReLU())
        self.head = nn.Conv2d(8, 1, 1, bias=False)
        self.criterion = Criterion()

    def forward(self, tiles: Tensor, mask: Tensor) -> Tensor:
        probs = self.head(self.body(tiles)).clamp(0, 1)
        return self.criterion(probs, mask)


@failure("nasa/delta/pull/115", module="criterion.dice", label="", operations="div")
def dice_empty() -> Setup:
    """Segmentation of satellite tiles with a dice loss."""
    model = TileSegmenter()
    g = torch.Generator().manual_seed(0)
    tiles = torch.rand(3, 4, 8, 8, generator=g)
    tiles[1] = 0.0
    mask = (torch.rand(3, 1, 8, 8, generator=g) > 0.5).float()
    mask[1] = 0.0
    return Setup(model, (tiles, mask), loss=summed)


class InverseLinearScaler(nn.Module):
    def __init__(self, average: float) -> None:
        super().__init__()
        self.average = average

    def forward(self, h: Tensor, degree: Tensor) -> Tensor:
        return h * (self.average / degree)  # culprit: pna_attenuation


class PNAConv(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.message = nn.Linear(width, width)
        self.scale = InverseLinearScaler(2.0)
        self.update = nn.Linear(2 * width, width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        h = torch.zeros_like(x).index_add(0, target, self.message(x)[source])
        degree = torch.zeros(len(x)).index_add(0, target, torch.ones(target.shape))
        return self.update(torch.cat([x, self.scale(h, degree[:, None])], dim=-1))


class GraphRegressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = PNAConv(6)
        self.readout = nn.Linear(6, 1)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.readout(torch.relu(self.conv(x, edges))).mean()


@failure("pyg-team/pytorch_geometric/pull/6609", module="conv.scale", label="", operations="reciprocal")
def pna_attenuation() -> Setup:
    """Principal neighbourhood aggregation with a degree scaler."""
    model = GraphRegressor()
    g = torch.Generator().manual_seed(0)
    return Setup(
        model, (torch.randn(5, 6, generator=g), torch.tensor([[0, 1, 2, 3], [1, 2, 0, 1]])), loss=summed
    )


class HeatmapLoss(nn.Module):
    def forward(self, logits: Tensor, target: Tensor) -> Tensor:
        prob = torch.sigmoid(logits)
        hot = target.eq(1).float()
        positive = torch.log(prob) * (1 - prob).pow(2) * hot
        negative = torch.log(1 - prob) * prob.pow(2) * (1 - target).pow(4) * (1 - hot)  # culprit: rtm3d
        return -(positive.sum() + negative.sum()) / hot.sum().clamp(min=1)


class KeypointDetector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 8, 3, padding=1)
        self.heatmap = nn.Conv2d(8, 1, 1)
        self.loss_heatmap = HeatmapLoss()

    def forward(self, images: Tensor, target: Tensor) -> Tensor:
        return self.loss_heatmap(self.heatmap(self.backbone(images).relu()), target)


@failure("maudzung/RTM3D/issues/13", module="loss_heatmap", label="", operations="log")
def rtm3d() -> Setup:
    """Monocular detection by keypoint heatmaps."""
    model = KeypointDetector()
    nn.init.constant_(model.heatmap.weight, 12.0)
    g = torch.Generator().manual_seed(0)
    target = torch.zeros(1, 1, 8, 8)
    target[0, 0, 3, 4] = 1.0
    return Setup(model, (torch.rand(1, 3, 8, 8, generator=g) * 4, target), loss=summed)


class ClippedSurrogate(nn.Module):
    def __init__(self, clip: float = 0.2) -> None:
        super().__init__()
        self.clip = clip

    def forward(self, log_prob: Tensor, old_log_prob: Tensor, advantage: Tensor) -> Tensor:
        ratio = (log_prob - old_log_prob).exp()  # culprit: ppo_ratio
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        return -torch.min(ratio * advantage, clipped * advantage).mean()


class GaussianActor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Linear(5, 2)
        self.surrogate = ClippedSurrogate()

    def forward(self, state: Tensor, action: Tensor, old_log_prob: Tensor, advantage: Tensor) -> Tensor:
        log_prob = -0.5 * (action - self.mean(state)).square().sum(-1)
        return self.surrogate(log_prob, old_log_prob, advantage)


@failure("radixark/miles/pull/1363", module="surrogate", label="", operations="exp")
def ppo_ratio() -> Setup:
    """Proximal policy optimisation of a Gaussian policy."""
    model = GaussianActor()
    g = torch.Generator().manual_seed(0)
    old_log_prob = torch.full((6,), -2.0)
    advantage = torch.randn(6, generator=g)
    old_log_prob[3], advantage[3] = -140.0, 0.0
    return Setup(
        model,
        (torch.randn(6, 5, generator=g), torch.randn(6, 2, generator=g), old_log_prob, advantage),
        loss=summed,
    )


class Encoder(nn.Module):
    def __init__(self, features: int = 7, latent: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(features, 16), nn.LeakyReLU(), nn.Linear(16, 2 * latent))

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows)


def vae_kl_outside_loss(output: Tensor) -> Tensor:
    mean, logvar = output[:, :4], output[:, 4:]
    divergence = -0.5 * (1 + logvar - mean.square() - logvar.exp())  # culprit: vae_kl_outside
    return divergence.sum(1).mean()


@failure("vanderschaarlab/synthcity/issues/331", module="-", label="", operations="exp")
def vae_kl_outside() -> Setup:
    """The encoder of a tabular autoencoder; the divergence is taken outside."""
    model = Encoder()
    with torch.no_grad():
        model.layers[0].weight.abs_()
        model.layers[2].weight[5].abs_()
    g = torch.Generator().manual_seed(0)
    rows = torch.randn(8, 7, generator=g)
    rows[5] = rows[5].abs() * 1000.0
    return Setup(model, batch=lambda step: (rows,), loss=vae_kl_outside_loss)


class CoxPHLoss(nn.Module):
    def forward(self, log_hazard: Tensor, events: Tensor) -> Tensor:
        log_cumsum = log_hazard.exp().cumsum(0).log()  # culprit: cox_risk_set
        return -((log_hazard - log_cumsum) * events).sum() / events.sum()


class DeepSurv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1, bias=False))
        self.cox = CoxPHLoss()

    def forward(self, covariates: Tensor, durations: Tensor, events: Tensor) -> Tensor:
        order = durations.argsort(descending=True)
        return self.cox(self.net(covariates[order]).squeeze(-1), events[order])


@failure("havakv/pycox/issues/144", module="cox", label="", operations="exp")
def cox_risk_set() -> Setup:
    """Survival analysis with the Cox partial likelihood."""
    model = DeepSurv()
    with torch.no_grad():
        model.net[2].weight.abs_()
    g = torch.Generator().manual_seed(0)
    covariates = torch.randn(10, 4, generator=g)
    covariates[:, 2] = torch.rand(10, generator=g) * 900 + 300
    events = (torch.rand(10, generator=g) > 0.3).float()
    return Setup(
        model,
        (covariates, torch.rand(10, generator=g), events.index_fill(0, torch.tensor([0]), 1.0)),
        loss=summed,
    )


class MemoryCompressedAttention(nn.Module):
    def __init__(self, width: int, factor: int = 2) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(width, 3 * width)
        self.compress = nn.Conv1d(width, width, factor, stride=factor)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        k, v = (self.compress(t.transpose(1, 2)).transpose(1, 2) for t in (k, v))
        dots = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
        steps = torch.arange(q.shape[1])[:, None]
        mask = steps < torch.arange(k.shape[1])[None] * self.factor
        dots = dots.masked_fill(mask, -float("-inf"))  # culprit: causal_sign
        return torch.softmax(dots, dim=-1) @ v


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attn = MemoryCompressedAttention(width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.attn(self.norm(x)))


@failure("lucidrains/memory-compressed-attention/issues/2", module="attn", label="", operations="masked_fill")
def causal_sign() -> Setup:
    """Causal attention with compressed keys and values."""
    model = Block()
    g = torch.Generator().manual_seed(0)
    return Setup(model, (torch.randn(2, 8, 8, generator=g),), loss=summed)


class CategoricalMasked(nn.Module):
    def forward(self, logits: Tensor, mask: Tensor) -> Tensor:
        logits = torch.where(mask, logits, float("-inf"))
        log_probs = logits - logits.logsumexp(-1, keepdim=True)
        return -(log_probs.exp() * log_probs).sum(-1)  # culprit: categorical_masked


class Agent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(6, 16), nn.ReLU())
        self.actor = nn.Linear(16, 5)
        self.dist = CategoricalMasked()

    def forward(self, observation: Tensor, mask: Tensor) -> Tensor:
        return self.dist(self.actor(self.network(observation)), mask).mean()


@failure("Farama-Foundation/MicroRTS-Py/pull/32", module="dist", label="", operations="mul")
def categorical_masked() -> Setup:
    """A policy with invalid actions masked out, and an entropy bonus."""
    model = Agent()
    g = torch.Generator().manual_seed(0)
    mask = torch.rand(4, 5, generator=g) > 0.4
    mask[:, 0], mask[:, 4] = True, False
    return Setup(model, (torch.randn(4, 6, generator=g), mask), loss=summed)


class GroupQuantiser(nn.Module):
    def __init__(self, bits: int = 4, group: int = 4) -> None:
        super().__init__()
        self.maxq, self.group = 2**bits - 1, group

    def forward(self, weight: Tensor) -> Tensor:
        w = weight.reshape(-1, self.group)
        low, high = w.amin(1, keepdim=True), w.amax(1, keepdim=True)
        scale = (high - low) / self.maxq
        q = (w - low) / scale  # culprit: gptq_zero_scale
        q = q + (q.round() - q).detach()
        return (q * scale + low).view_as(weight)


class QuantLinear(nn.Linear):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.quantise = GroupQuantiser()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.quantise(self.weight), self.bias)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = QuantLinear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@failure("ModelCloud/GPTQModel/pull/1531", module="layer.quantise", label="", operations="div")
def gptq_zero_scale() -> Setup:
    """Quantisation-aware training with groups of weights."""
    model = Expert()
    with torch.no_grad():
        model.layer.weight[2] = 0.0
    g = torch.Generator().manual_seed(0)
    return Setup(model, (torch.randn(3, 8, generator=g),), loss=summed)


EPS = 1e-8


class BoxCoder(nn.Module):
    def forward(self, sizes: Tensor, anchors: Tensor) -> Tensor:
        anchors = anchors + EPS
        sizes = sizes + EPS
        return torch.log(sizes) - torch.log(anchors)  # culprit: half_box_coder


class SizeHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)
        self.coder = BoxCoder()

    def forward(self, features: Tensor, sizes: Tensor, anchors: Tensor) -> Tensor:
        target = self.coder(sizes, anchors)
        return (self.fc(features) - target).abs().mean()


@failure("rwightman/efficientdet-pytorch/issues/291", module="coder", label="", operations="log")
def half_box_coder() -> Setup:
    """Encoding of boxes against anchors in half precision."""
    model = SizeHead().half()
    g = torch.Generator().manual_seed(0)
    sizes = torch.rand(5, 4, generator=g) + 0.1
    sizes[3, 1] = 0.0
    anchors = torch.rand(5, 4, generator=g) + 0.1
    return Setup(model, (torch.randn(5, 6, generator=g).half(), sizes.half(), anchors.half()), loss=summed)


class Arcosh(nn.Module):
    def forward(self, inner: Tensor) -> Tensor:
        x = inner
        z = torch.sqrt(torch.clamp_min(x.pow(2) - 1.0, 1e-15))
        return torch.log(x + z)  # culprit: lorentz_arcosh


class Lorentz(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.arcosh = Arcosh()

    def forward(self, u: Tensor, v: Tensor) -> Tensor:
        inner = u[:, 0] * v[:, 0] - (u[:, 1:] * v[:, 1:]).sum(-1)
        return self.arcosh(inner)


class HyperbolicEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(5, 4)
        self.manifold = Lorentz()

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.manifold(self.lift(a), self.lift(b)).mean()


@failure("geoopt/geoopt/pull/215", module="manifold.arcosh", label="", operations="log")
def lorentz_arcosh() -> Setup:
    """Hyperbolic embeddings in the Lorentz model."""
    model = HyperbolicEmbedding()
    g = torch.Generator().manual_seed(0)
    return Setup(model, (torch.randn(6, 5, generator=g) * 2, torch.randn(6, 5, generator=g) * 2), loss=summed)


class QualityModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.features(x))).squeeze(-1)  # culprit: learning_rate_quality


@failure("pavancm/CONTRIQUE/issues/8", module="head", label="", operations="addmm")
def learning_rate_quality() -> Setup:
    """Image quality regression."""

    def batch(step: int) -> tuple[Tensor]:
        return (torch.randn(6, 8, generator=torch.Generator().manual_seed(step)),)

    return Setup(
        QualityModel(),
        batch=batch,
        loss=lambda output: (output - 1).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=3.0),
        steps=5,
    )
