"""Trains a small network with Lightning, a learning rate that is too high."""

# ruff: noqa: T201

import sys

import lightning
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset


class LitModel(lightning.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.lr = lr
        self.encoder = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        self.head = nn.Linear(8, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = functional.l1_loss(self.head(self.encoder(x)), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", functional.l1_loss(self.head(self.encoder(x)), y))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def main():
    lightning.seed_everything(0)
    x = torch.randn(64, 4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
    trainer = lightning.Trainer(
        max_epochs=10, accelerator="cpu", precision=sys.argv[2], logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(LitModel(float(sys.argv[1])), loader, loader)
    print("done after", trainer.global_step, "steps")


if __name__ == "__main__":
    main()
