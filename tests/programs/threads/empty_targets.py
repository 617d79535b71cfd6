"""Targets without a foreground, silence, and clips of one frame."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from programs.case import thread
from programs.threads import encoder

BASE = "https://github.com/"


class EdgeLoss(nn.Module):
    """Adds the mean over the pixels at edges."""

    def forward(self, logits: Tensor, target: Tensor, edges: Tensor) -> Tensor:
        losses = F.binary_cross_entropy_with_logits(logits, target, reduction="none")
        at_edges = losses * edges
        at_edges = at_edges[edges == 1]
        return losses.mean() + 0.5 * at_edges.mean()  # culprit: image_without_edges


@thread(BASE + "Deci-AI/super-gradients/issues/912")
def image_without_edges():
    criterion, target = EdgeLoss(), torch.ones(4, 4)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        dilated = F.max_pool2d(target[None, None], 3, 1, 1)[0, 0]
        return criterion(model(x), target, dilated - target)

    return encoder(), (torch.randn(4, 6),), loss


class ChunkedCrossEntropy(nn.Module):
    def __init__(self, num_chunks: int = 2, ignore_index: int = -100) -> None:
        super().__init__()
        self.num_chunks, self.ignore_index = num_chunks, ignore_index

    def forward(self, logits: list[Tensor], labels: Tensor) -> Tensor:
        total_elements = (labels != self.ignore_index).sum()
        chunks = [chunk.reshape(-1) for chunk in labels.chunk(self.num_chunks, dim=1)]
        total_loss = 0.0
        for part, chunk in zip(logits, chunks, strict=True):
            part = part.reshape(-1, part.shape[-1])
            total_loss += F.cross_entropy(
                part.float(), chunk, ignore_index=self.ignore_index, reduction="sum"
            )
        return total_loss / total_elements  # culprit: chunks_without_labels


@thread(BASE + "meta-pytorch/torchtune/issues/2341")
def chunks_without_labels():
    criterion, labels = ChunkedCrossEntropy(), torch.full((2, 6), -100)

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        return criterion(list(model(tokens).chunk(2, dim=1)), labels)

    return nn.Sequential(nn.Embedding(9, 6), encoder()), (torch.randint(9, (2, 6)),), loss


class StatsPool(nn.Module):
    def forward(self, sequences: Tensor) -> Tensor:
        mean = sequences.mean(dim=-1)
        std = sequences.std(dim=-1, correction=1)  # culprit: clip_of_one_frame
        return torch.cat([mean, std], dim=-1)


@thread(BASE + "pyannote/pyannote-audio/issues/1861")
def clip_of_one_frame():
    model = nn.Sequential(nn.Conv1d(3, 4, 3), nn.LeakyReLU(), StatsPool(), nn.Linear(8, 2))
    return model, (torch.randn(2, 3, 3), torch.tensor([0, 1])), lambda m, x, y: F.cross_entropy(m(x), y)


class BandEnvelopes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bands", torch.rand(3, 9))

    def forward(self, wave: Tensor) -> Tensor:
        spectrum = torch.view_as_real(torch.fft.rfft(wave.unfold(-1, 16, 8))).pow(2).sum(-1)
        return torch.sqrt(torch.matmul(spectrum, self.bands.T))  # culprit: silent_envelope


@thread(BASE + "mpariente/pytorch_stoi/issues/7")
def silent_envelope():
    envelopes, clean = BandEnvelopes(), torch.randn(2, 64)

    def loss(model: nn.Module, noisy: Tensor) -> Tensor:
        mask = torch.sigmoid(model(noisy[..., None])[..., 0])
        return (envelopes(mask * noisy) - envelopes(clean)).abs().mean()

    noisy = torch.randn(2, 64)
    noisy[1, :24] = 0
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), (noisy,), loss


def iou(pred: Tensor, target: Tensor) -> Tensor:
    total = 0.0
    for i in range(pred.shape[0]):
        intersection = torch.sum(target[i] * pred[i])
        union = torch.sum(target[i]) + torch.sum(pred[i]) - intersection
        total = total + (1 - intersection / union)  # culprit: empty_ground_truth
    return total / pred.shape[0]


@thread(BASE + "xuebinqin/BASNet/pull/69")
def empty_ground_truth():
    target = (torch.rand(3, 4) > 0.5).float()
    target[2] = 0
    model = encoder()
    nn.init.constant_(model[2].bias, -120.0)
    return model, (torch.randn(3, 6),), lambda m, x: iou(torch.sigmoid(m(x)), target)
