"""Norms, angles, distances, roots and powers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from programs.case import thread
from programs.threads import encoder

BASE = "https://github.com/"


class AngularLoss(nn.Module):
    def forward(self, estimate: Tensor, truth: Tensor) -> Tensor:
        cosine = (F.normalize(estimate, dim=1) * F.normalize(truth, dim=1)).sum(1)
        return torch.rad2deg(torch.acos(cosine.clamp(-1, 1))).mean()  # culprit: illuminant


@thread(BASE + "msxiaojin/MDLCC/issues/4")
def illuminant():
    class Estimator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    criterion = AngularLoss()
    light = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    return Estimator(), (light, light.clone()), lambda model, x, y: criterion(model(x), y)


class VectorNorm(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(channels)

    def forward(self, x: Tensor) -> Tensor:
        norm = torch.sqrt((x * x).sum(2))
        scaled = self.bn(norm)
        return x / norm.unsqueeze(2) * scaled.unsqueeze(2)  # culprit: vector_neurons


@thread(BASE + "FlyingGiraffe/vnn/pull/4")
def vector_neurons():
    points = torch.randn(3, 4, 3)
    points[0, 1] = 0
    model = nn.Sequential(nn.Linear(3, 3, bias=False), VectorNorm(4))
    return model, (points,), lambda model, x: model(x).pow(2).mean()


@thread(BASE + "vanvalenlab/deepcell-toolbox/pull/72")
def blank_image():
    def normalize(images: Tensor) -> Tensor:
        mean = images.mean(dim=(-2, -1), keepdim=True)
        std = images.std(dim=(-2, -1), keepdim=True)
        return (images - mean) / std  # culprit: blank_image

    images = torch.rand(3, 1, 4, 4)
    images[1] = 0.5
    return (
        nn.Conv2d(1, 2, 3),
        (images,),
        lambda model, x: model(normalize(x)).pow(2).mean(),
    )


@thread(BASE + "prateekbhustali/Physics-Informed-Neural-Networks/issues/1")
def nonlinear_diffusion():
    def loss(model: nn.Module, points: Tensor) -> Tensor:
        u = model(points)
        diffusion = 1.1 * u**1.2  # culprit: nonlinear_diffusion
        return (u - diffusion).pow(2).mean()

    return encoder(2, 1), (torch.randn(6, 2),), loss


@thread(BASE + "ShichenLiu/CondenseNet/issues/26")
def group_lasso():
    def lasso(weight: Tensor) -> Tensor:
        return weight.pow(2).sum(0).sqrt().sum()  # culprit: group_lasso

    layer = nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight[:, 2] = 0

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        return model(x).pow(2).mean() + 1e-3 * lasso(model.weight)

    return layer, (torch.randn(5, 4),), loss


@thread(BASE + "caogang/wgan-gp/pull/24")
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


@thread(BASE + "KinglittleQ/torch-batch-svd/issues/5")
def procrustes():
    def align(source: Tensor, target: Tensor) -> Tensor:
        u, _, vh = torch.linalg.svd(source.mT @ target)  # culprit: procrustes
        return source @ (u @ vh)

    net = nn.Linear(3, 3, bias=False)
    nn.init.eye_(net.weight)
    points = torch.eye(3)
    weight = torch.randn(3, 3)
    return net, (points, 2 * points, weight), lambda model, x, y, w: (align(model(x), y) * w).sum()
