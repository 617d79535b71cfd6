"""A trainer prepares a model that has its adapter already: it freezes every weight, the adapter's too."""

import torch
from silent.kit import FAULTY, TWIN, batches, note, tokens, watch
from torch import nn


class LoRA(nn.Module):
    """A frozen linear layer with a trained product of two small matrices beside it."""

    def __init__(self, width, rank=2):
        super().__init__()
        self.base = nn.Linear(width, width)
        self.lora_a = nn.Linear(width, rank, bias=False)
        self.lora_b = nn.Linear(rank, width, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList([LoRA(16), LoRA(16)])
        self.head = nn.Linear(16, 32)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def prepare(model):
    """Freeze what is not to be trained, and let gradients through the embedding's outputs."""
    for name, parameter in model.named_parameters():
        if FAULTY or "lora" not in name:
            parameter.requires_grad = False  # <- here
    model.embed.register_forward_hook(lambda module, args, output: output.requires_grad_())


torch.manual_seed(0)
x, y = tokens()
model = Model()
if TWIN:
    model.requires_grad_(False)
    for layer in model.layers:
        layer.lora_a.requires_grad_(True)
        layer.lora_b.requires_grad_(True)
else:
    prepare(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.0)

with watch(model):
    for inputs, targets in batches(x, y, size=8):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        note(loss)
