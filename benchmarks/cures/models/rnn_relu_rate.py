"""Word language model with a ReLU network."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

parser = {"lr": 20.0, "nhid": 12}


class RNNModel(nn.Module):
    def __init__(self, tokens: int = 10) -> None:
        super().__init__()
        self.encoder = nn.Embedding(tokens, int(parser["nhid"]))
        self.rnn = nn.RNN(int(parser["nhid"]), int(parser["nhid"]), nonlinearity="relu")
        self.decoder = nn.Linear(int(parser["nhid"]), tokens)

    def forward(self, text: Tensor) -> Tensor:
        h, _ = self.rnn(self.encoder(text))
        return self.decoder(h)


def make() -> nn.Module:
    torch.manual_seed(0)
    return RNNModel()


def optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=parser["lr"])


def batch(seed: int = 0) -> tuple[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return (torch.randint(10, (35, 4), generator=g),)


def loss(output: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), torch.arange(len(output.flatten(0, 1))) % 10)
