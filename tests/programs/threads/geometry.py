"""Norms, angles, distances, roots and powers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from programs.case import loss_by, thread
from programs.threads import encoder, identity, zero_head


def eigenvalue_angle(matrix: Tensor) -> Tensor:
    trace = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    centred = matrix - trace[:, None, None] * torch.eye(3, dtype=matrix.dtype)
    scale = (centred.pow(2).sum((-2, -1)) / 6).sqrt()
    half_determinant = torch.linalg.det(centred / scale[:, None, None]) / 2
    return torch.acos(half_determinant.clamp(-1, 1)) / 3  # culprit: symmetric_eigenvalues


class Tensors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.diagonal = nn.Parameter(torch.tensor([[1.0, 1.0, 3.0], [2.0, 2.0, 5.0]]))

    def forward(self) -> Tensor:
        return torch.diag_embed(self.diagonal)


@thread("banctilrobitaille/torch-vectorized/issues/7")
def symmetric_eigenvalues():
    return Tensors(), (), lambda model: eigenvalue_angle(model()).sum()


class HardTriplets(nn.Module):
    def __init__(self, margin: float = 0.3) -> None:
        super().__init__()
        self.margin = margin

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        square = torch.pow(inputs, 2).sum(dim=1, keepdim=True)
        distance = square + square.t() - 2 * inputs @ inputs.t()
        distance = distance.clamp(min=0).sqrt()  # culprit: hard_triplets
        same = targets[:, None] == targets[None]
        hardest = (distance * same).max(1).values
        nearest = (distance + 1e3 * same).min(1).values
        return F.relu(hardest - nearest + self.margin).mean()


@thread("AsuradaYuci/understand_videobased_reid/issues/6")
def hard_triplets():
    return encoder(), (torch.randn(4, 6), torch.tensor([0, 0, 1, 1])), loss_by(HardTriplets())


@thread("pytorch/pytorch/issues/4320")
def minibatch_deviation():
    class Discriminator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features, self.head = encoder(outputs=8, gain=0.0), nn.Linear(9, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.features(x)
            spread = h.var(dim=0).sqrt().mean().expand(len(h), 1)  # culprit: minibatch_deviation
            return self.head(torch.cat([h, spread], 1))

    return Discriminator(), (torch.randn(4, 6),), lambda model, x: F.softplus(-model(x)).mean()


class StandardConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean(dim=[1, 2, 3], keepdim=True)
        std = torch.sqrt(torch.var(weight.flatten(1), dim=1)).view(-1, 1, 1, 1) + 1e-5  # culprit: weight_std
        return F.conv2d(x, weight / std, self.bias, padding=self.padding)


@thread("joe-siyuan-qiao/WeightStandardization/issues/16")
def weight_std():
    conv = StandardConv(1, 2, 3, padding=1)
    with torch.no_grad():
        conv.weight[1] = 0.25
    return nn.Sequential(conv, nn.ReLU()), (torch.randn(2, 1, 4, 4),), lambda model, x: model(x).pow(2).mean()


class VectorNorm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(channels)

    def forward(self, x: Tensor) -> Tensor:
        norm = torch.sqrt((x * x).sum(2))
        scaled = self.bn(norm)
        return x / norm.unsqueeze(2) * scaled.unsqueeze(2)  # culprit: vector_neurons


@thread("FlyingGiraffe/vnn/pull/4")
def vector_neurons():
    points = torch.randn(3, 4, 3)
    points[0, 1] = 0
    model = nn.Sequential(nn.Linear(3, 3, bias=False), VectorNorm(4))
    return model, (points,), lambda model, x: model(x).pow(2).mean()


@thread("vanvalenlab/deepcell-toolbox/pull/72")
def blank_image():
    def normalize(images: Tensor) -> Tensor:
        mean = images.mean(dim=(-2, -1), keepdim=True)
        std = images.std(dim=(-2, -1), keepdim=True)
        return (images - mean) / std  # culprit: blank_image

    images = torch.rand(3, 1, 4, 4)
    images[1] = 0.5
    return nn.Conv2d(1, 2, 3), (images,), lambda model, x: model(normalize(x)).pow(2).mean()


@thread("mihaidusmanu/d2-net/issues/78")
def soft_detection():
    class SoftDetection(nn.Module):
        def forward(self, batch: Tensor) -> Tensor:
            depth_wise_max = torch.max(batch, dim=1)[0]
            score = batch / depth_wise_max.unsqueeze(1)  # culprit: soft_detection
            return score / (1 + score.sum((2, 3), keepdim=True))

    features = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU())
    with torch.no_grad():
        features[0].bias.fill_(-5.0)
    detector = nn.Sequential(features, SoftDetection())
    return detector, (torch.rand(2, 1, 5, 5),), lambda model, x: model(x).mean()


def contact_direction(points: Tensor, origin: Tensor) -> Tensor:
    offset = points - origin
    return offset / offset.norm(dim=-1, keepdim=True)  # culprit: contact


@thread("otaheri/GrabNet/issues/2")
def contact():
    origin = torch.tensor([1.0, 2.0, 3.0])
    batch = torch.stack([origin, origin + 1]), origin
    return identity(3), batch, lambda model, x, o: (1 - contact_direction(model(x), o)[:, 0]).mean()


class Distances(nn.Module):
    def forward(self, positions: Tensor) -> Tensor:
        vectors = positions[:, None] - positions[None]
        return torch.sqrt(vectors.pow(2).sum(-1))  # culprit: padded_atoms


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.distances, self.filter = Distances(), nn.Linear(1, 4)
        self.embed = nn.Parameter(torch.randn(3, 3))

    def forward(self, positions: Tensor) -> Tensor:
        distances = self.distances(positions @ self.embed)
        return torch.tanh(self.filter(distances[..., None])).sum()


@thread("atomistic-machine-learning/schnetpack/pull/6")
def padded_atoms():
    return Energy(), (torch.randn(4, 3),), lambda model, x: model(x) ** 2


@thread("lululxvi/deepxde/issues/302")
def polar_origin():
    def residual(points: Tensor, u: Tensor) -> Tensor:
        x, y = points.unbind(1)
        source = 3 * (2 * x**2 + y**2) / torch.sqrt(x**2 + y**2)  # culprit: polar_origin
        return (u.squeeze(1) - source).pow(2).mean()

    points = torch.tensor([[0.5, 0.5], [0.0, 0.0], [1.0, 0.0]])
    return encoder(2, 1), (points,), lambda model, points: residual(points, model(points))


@thread("prateekbhustali/Physics-Informed-Neural-Networks/issues/1")
def nonlinear_diffusion():
    def loss(model: nn.Module, points: Tensor) -> Tensor:
        u = model(points)
        diffusion = 1.1 * u**1.2  # culprit: nonlinear_diffusion
        return (u - diffusion).pow(2).mean()

    return encoder(2, 1), (torch.randn(6, 2),), loss


@thread("tensorflow/tensorflow/issues/2295")
def gamma_correction():
    class ToSRGB(nn.Module):
        def forward(self, linear: Tensor) -> Tensor:
            return torch.clamp(linear, 0.0, 1.0).pow(1.0 / 2.4)  # culprit: gamma_correction

    renderer = nn.Sequential(zero_head(outputs=3), ToSRGB())
    return renderer, (torch.randn(4, 6),), lambda model, x: (model(x) - 0.5).pow(2).mean()


@thread("caogang/wgan-gp/pull/24")
def gradient_penalty():
    def penalty(critic: nn.Module, samples: Tensor) -> Tensor:
        samples = samples.detach().requires_grad_()
        (slope,) = torch.autograd.grad(critic(samples).sum(), samples, create_graph=True)
        return ((torch.sqrt(slope.pow(2).sum(1)) - 1) ** 2).mean()  # culprit: gradient_penalty

    critic = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    with torch.no_grad():
        critic[0].bias.fill_(-20.0)

    def loss(model: nn.Module, real: Tensor, fake: Tensor) -> Tensor:
        return model(fake).mean() - model(real).mean() + penalty(model, real)

    return critic, (torch.randn(5, 4), torch.randn(5, 4)), loss


@thread("KinglittleQ/torch-batch-svd/issues/5")
def procrustes():
    def align(source: Tensor, target: Tensor) -> Tensor:
        u, _, vh = torch.linalg.svd(source.mT @ target)  # culprit: procrustes
        return source @ (u @ vh)

    net, points, weight = identity(3), torch.eye(3), torch.randn(3, 3)
    return net, (points, 2 * points, weight), lambda model, x, y, w: (align(model(x), y) * w).sum()
