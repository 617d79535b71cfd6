"""Speech recognition: an utterance that is shorter than its transcript."""

import torch
from torch import Tensor, nn


class CTC(nn.Module):
    def __init__(self, units: int, tokens: int) -> None:
        super().__init__()
        self.ctc_lo = nn.Linear(units, tokens)
        self.ctc_loss = nn.CTCLoss(blank=0, reduction="sum")

    def forward(self, encoded: Tensor, frames: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        log_probs = self.ctc_lo(encoded).transpose(0, 1).log_softmax(-1)
        return self.ctc_loss(log_probs, text, frames, lengths) / encoded.shape[0]


class Recogniser(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 16)
        self.ctc = CTC(16, 6)

    def forward(self, speech: Tensor, frames: Tensor, text: Tensor, lengths: Tensor) -> Tensor:
        return self.ctc(torch.relu(self.encoder(speech)), frames, text, lengths)


def make() -> nn.Module:
    torch.manual_seed(0)
    return Recogniser()


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    text = torch.randint(1, 6, (3, 7), generator=g)
    return torch.randn(3, 20, 8, generator=g), torch.tensor([20, 18, 4]), text, torch.tensor([5, 7, 6])


def loss(output: Tensor) -> Tensor:
    return output
