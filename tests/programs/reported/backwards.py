"""Models rebuilt from public reports that fail in the backward. Their code is our own."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from programs.case import Setup, failure


class ArcMarginProduct(nn.Module):
    def __init__(self, width: int, classes: int, s: float = 30.0, m: float = 0.5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(classes, width))
        nn.init.xavier_uniform_(self.weight)
        self.s, self.cos_m, self.sin_m = s, math.cos(m), math.sin(m)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(x), F.normalize(self.weight))
        sine = torch.sqrt((1.0 - cosine.pow(2)).clamp(0, 1))  # culprit: arcface_sine
        phi = cosine * self.cos_m - sine * self.sin_m
        target = F.one_hot(label, cosine.shape[1]).bool()
        return self.s * torch.where(target, phi, cosine)


class FaceNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.margin = ArcMarginProduct(4, 3)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        return F.cross_entropy(self.margin(self.embed(x), label), label)


@failure("ronghuaiyang/arcface-pytorch/issues/91", module="margin", label="", operations="sqrt")
def arcface_sine() -> Setup:
    """Face recognition with an additive angular margin."""
    model = FaceNet()
    nn.init.eye_(model.embed.weight)
    with torch.no_grad():
        model.margin.weight[1] = torch.tensor([0.0, 2.0, 0.0, 0.0])
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, generator=g)
    x[2] = torch.tensor([0.0, 1.0, 0.0, 0.0])
    return Setup(model, (x, torch.tensor([0, 2, 1])), loss=lambda output: output)


class GeM(nn.Module):
    def __init__(self, p: float = 3.0, eps: float = 1e-6) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(1) * p)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(x.pow(self.p), x.shape[-2:]).pow(1.0 / self.p)  # culprit: gem_pooling


class Retrieval(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 5, 3), nn.ReLU())
        self.pool = GeM()
        self.whiten = nn.Linear(5, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.whiten(self.pool(self.features(images)).flatten(1))


@failure("facebookresearch/multigrain/issues/5", module="pool", label="", operations="pow")
def gem_pooling() -> Setup:
    """Image retrieval with generalized mean pooling and a learned exponent."""
    model = Retrieval()
    nn.init.constant_(model.features[0].bias[:2], -9.0)
    g = torch.Generator().manual_seed(0)
    return Setup(model, (torch.rand(3, 1, 8, 8, generator=g),), loss=lambda output: output.square().sum())


class ContrastiveLoss(nn.Module):
    def __init__(self, margin: float = 1.0) -> None:
        super().__init__()
        self.margin = margin

    def forward(self, a: Tensor, b: Tensor, same: Tensor) -> Tensor:
        distances = (a - b).pow(2).sum(1)
        gap = F.relu(self.margin - distances.sqrt())  # culprit: siamese_identical
        return 0.5 * (same * distances + (1 - same) * gap.pow(2)).mean()


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Sequential(nn.Linear(9, 12), nn.PReLU(), nn.Linear(12, 2))
        self.loss_fn = ContrastiveLoss()

    def forward(self, a: Tensor, b: Tensor, same: Tensor) -> Tensor:
        return self.loss_fn(self.embedding(a), self.embedding(b), same)


@failure("adambielski/siamese-triplet/issues/18", module="loss_fn", label="", operations="sqrt")
def siamese_identical() -> Setup:
    """Signature verification with a contrastive loss."""
    model = Siamese()
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(4, 9, generator=g), torch.randn(4, 9, generator=g)
    b[2] = a[2]
    return Setup(model, (a, b, torch.tensor([1.0, 0.0, 0.0, 1.0])), loss=lambda output: output)


class RotationToQuaternion(nn.Module):
    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def forward(self, r: Tensor) -> Tensor:
        trace = r.diagonal(dim1=-2, dim2=-1).sum(-1)
        sq = torch.sqrt(trace + 1.0) * 2.0  # culprit: rotation_to_quaternion
        by_trace = torch.stack([0.25 * sq, r[:, 2, 1] - r[:, 1, 2]], dim=-1)
        sx = torch.sqrt(1.0 + r[:, 0, 0].abs() + self.eps) * 2.0
        by_axis = torch.stack([(r[:, 2, 1] - r[:, 1, 2]) / sx, 0.25 * sx], dim=-1)
        return torch.where((trace > 0.0)[:, None], by_trace, by_axis)


class PoseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.correction = nn.Linear(4, 9)
        self.to_quaternion = RotationToQuaternion()

    def forward(self, features: Tensor, rotation: Tensor) -> Tensor:
        return self.to_quaternion(rotation + self.correction(features).view(-1, 3, 3))


@failure("kornia/kornia/issues/1653", module="to_quaternion", label="", operations="sqrt")
def rotation_to_quaternion() -> Setup:
    """Pose estimation: rotation matrices to quaternions."""
    model = PoseNet()
    nn.init.zeros_(model.correction.weight)
    nn.init.zeros_(model.correction.bias)
    g = torch.Generator().manual_seed(0)
    half_turn = torch.diag(torch.tensor([1.0, -1.0, -1.0]))
    return Setup(
        model,
        (torch.randn(2, 4, generator=g), torch.stack([torch.eye(3), half_turn])),
        loss=lambda output: output.square().sum(),
    )


class GeodesicDistance(nn.Module):
    def forward(self, m1: Tensor, m2: Tensor) -> Tensor:
        m = torch.bmm(m1, m2.transpose(1, 2))
        cos = (m.diagonal(dim1=1, dim2=2).sum(1) - 1) / 2
        return torch.acos(cos.clamp(-1.0, 1.0))  # culprit: geodesic_loss


class GeodesicLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.distance = GeodesicDistance()

    def forward(self, pred: Tensor, truth: Tensor) -> Tensor:
        return self.distance(pred, truth).mean()


class RotationNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(3, 6)
        self.criterion = GeodesicLoss()

    def forward(self, points: Tensor, truth: Tensor) -> Tensor:
        a, b = self.net(points).chunk(2, dim=1)
        x = F.normalize(a)
        z = F.normalize(torch.linalg.cross(x, b))
        return self.criterion(torch.stack([x, torch.linalg.cross(z, x), z], dim=2), truth)


@failure("papagina/RotationContinuity/issues/11", module="criterion.distance", label="", operations="acos")
def geodesic_loss() -> Setup:
    """Rotation regression from a six-dimensional representation."""
    model = RotationNet()
    nn.init.zeros_(model.net.weight)
    with torch.no_grad():
        model.net.bias.copy_(torch.tensor([1.0, 0.0, 0.0, 0.0, 1.0, 0.0]))
    g = torch.Generator().manual_seed(0)
    quarter = torch.tensor([[0.0, -1.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])
    return Setup(
        model,
        (torch.randn(2, 3, generator=g), torch.stack([torch.eye(3), quarter])),
        loss=lambda output: output,
    )


class ValidMSE(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.criterion = nn.MSELoss(reduction="none")

    def forward(self, pred: Tensor, target: Tensor) -> Tensor:
        valid = torch.logical_not(torch.isnan(target))
        return self.criterion(pred, target)[valid].sum()  # culprit: mse_missing_targets


class AssayModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fingerprint = nn.Linear(16, 8)
        self.assays = nn.Linear(8, 4)
        self.objective = ValidMSE()

    def forward(self, bits: Tensor, target: Tensor) -> Tensor:
        return self.objective(self.assays(torch.relu(self.fingerprint(bits))), target)


@failure("pytorch/pytorch/issues/121416", module="objective.criterion", label="", operations="mse_loss")
def mse_missing_targets() -> Setup:
    """Assay prediction: every molecule lacks most of the targets."""
    model = AssayModel()
    g = torch.Generator().manual_seed(0)
    target = torch.randn(5, 4, generator=g)
    target[torch.rand(5, 4, generator=g) > 0.5] = float("nan")
    target[0], target[1, 0] = 1.0, float("nan")
    bits = (torch.rand(5, 16, generator=g) > 0.5).float()
    return Setup(model, (bits, target), loss=lambda output: output)


class PrincipalBasis(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.eye(width))

    def forward(self) -> Tensor:
        covariance = self.factor @ self.factor.T
        _, vectors = torch.linalg.eigh(covariance)  # culprit: eigenvectors_repeated
        return vectors


class SpectralModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.basis = PrincipalBasis(4)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(x @ self.basis()))


@failure("pytorch/pytorch/issues/23133", module="basis", label="", operations="linalg_eigh")
def eigenvectors_repeated() -> Setup:
    """A layer that rotates features into the principal basis of a learned covariance."""
    model = SpectralModel()
    g = torch.Generator().manual_seed(0)
    return Setup(model, (torch.randn(5, 4, generator=g),), loss=lambda output: output.square().mean())


class Companding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, torch.sqrt(x), x)  # culprit: where_sqrt_negative


class WaveNetBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.analysis = nn.Conv1d(1, 4, 3, padding=1)
        self.companding = Companding()
        self.synthesis = nn.Conv1d(4, 1, 3, padding=1)

    def forward(self, wave: Tensor) -> Tensor:
        return self.synthesis(self.companding(self.analysis(wave)))


@failure("tensorflow/tensorflow/pull/38467", module="companding", label="", operations="sqrt")
def where_sqrt_negative() -> Setup:
    """Audio with a companding nonlinearity between two convolutions."""
    model = WaveNetBlock()
    g = torch.Generator().manual_seed(0)
    return Setup(model, (torch.randn(2, 1, 20, generator=g),), loss=lambda output: output.square().mean())


LOSS_SCALE = 512.0


class Regressor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.neck = nn.Linear(16, 16)
        self.reg = nn.Linear(16, 4)

    def forward(self, features: Tensor) -> Tensor:
        return self.reg(torch.relu(self.neck(features)))  # culprit: static_loss_scale


@failure("open-mmlab/mmdetection/issues/3690", module="reg", label="", operations="addmm")
def static_loss_scale() -> Setup:
    """Half-precision training with a fixed loss scale."""
    model = Regressor().half()
    g = torch.Generator().manual_seed(0)
    return Setup(
        model,
        ((120 * torch.randn(32, 16, generator=g)).half(),),
        loss=lambda output: output.float().square().sum(1).mean() * LOSS_SCALE,
    )


class Demodulate(nn.Module):
    def forward(self, symbol: Tensor) -> Tensor:
        return torch.angle(symbol)  # culprit: complex_head_angle


class Equaliser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.taps = nn.Parameter(torch.tensor([1.0 + 0.1j, 0.0 + 0.0j]))

    def forward(self, received: Tensor) -> Tensor:
        delayed = torch.roll(received, 1, dims=-1)
        return self.taps[0] * received + self.taps[1] * delayed


class Receiver(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.equalise = Equaliser()
        self.demodulate = Demodulate()

    def forward(self, received: Tensor) -> Tensor:
        return self.demodulate(self.equalise(received))


@failure("pytorch/pytorch/issues/98276", module="demodulate", label="", operations="angle")
def complex_head_angle() -> Setup:
    """A demodulator of phase-shift keying with a learned equaliser."""
    model = Receiver()
    g = torch.Generator().manual_seed(0)
    received = torch.randn(2, 8, dtype=torch.cfloat, generator=g)
    received[1, 3] = 1e-24 + 2e-24j
    return Setup(model, (received,), loss=lambda output: (1 - output.cos()).mean())


class StemMask(nn.Module):
    def __init__(self, stems: int = 2) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, stems, 1)

    def forward(self, magnitude: Tensor) -> Tensor:
        return torch.sigmoid(self.conv(magnitude[:, None])) * magnitude[:, None]


class Separator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask = StemMask()

    def forward(self, magnitude: Tensor) -> Tensor:
        return self.mask(magnitude)


def spectral_rmse_loss(output: Tensor) -> Tensor:
    error = output - 0.3 * output.detach().sum(1, keepdim=True)
    rmse = torch.sqrt(error.abs().square().mean((-2, -1)))  # culprit: spectral_rmse
    return rmse.mean()


@failure("ZFTurbo/Music-Source-Separation-Training/pull/200", module="-", label="", operations="sqrt")
def spectral_rmse() -> Setup:
    """Source separation of stems by a mask; the loss is a function of the training script."""
    model = Separator()
    g = torch.Generator().manual_seed(0)
    magnitude = torch.rand(3, 6, 5, generator=g)
    magnitude[1] = 0.0
    return Setup(model, (magnitude,), loss=spectral_rmse_loss)  # a method of the loop makes the call


class SelfAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = self.q(x) @ self.k(x).transpose(1, 2)
        bias = torch.zeros_like(scores).masked_fill(~mask, -torch.inf)
        weights = torch.softmax(scores + bias, dim=-1)  # culprit: attention_nan_refilled
        weights = weights.masked_fill(torch.isnan(weights), 0.0)
        return weights @ x


class SASRec(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(20, 6)
        self.layer = SelfAttention(6)

    def forward(self, history: Tensor, mask: Tensor) -> Tensor:
        return self.layer(self.items(history), mask)[:, -1] @ self.items.weight.T


@failure("THUwangcy/ReChorus/issues/8", module="layer", label="", operations="_softmax")
def attention_nan_refilled() -> Setup:
    """Sequential recommendation with self-attention over the history."""
    model = SASRec()
    g = torch.Generator().manual_seed(0)
    mask = torch.ones(3, 5, 5, dtype=torch.bool).tril()
    mask[2, :, :3] = False
    return Setup(
        model,
        (torch.randint(20, (3, 5), generator=g), mask),
        loss=lambda output: nn.functional.cross_entropy(output, torch.tensor([1, 2, 3])),
    )
