"""A reference adapter freezes the trained one before the optimizer collects what is trained, and frees it after."""

import torch
from silent.kit import FAULTY, TWIN, batches, note, regression, watch
from torch import nn


class Adapted(nn.Module):
    """A frozen base with two adapters: the policy's and a copy for reference."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.value = nn.Linear(8, 1)
        self.adapters = nn.ModuleDict(
            {"default": nn.Linear(8, 8, bias=False), "ref": nn.Linear(8, 8, bias=False)}
        )
        self.base.requires_grad_(False)
        nn.init.zeros_(self.adapters["default"].weight)

    def forward(self, x):
        return self.value((self.base(x) + self.adapters["default"](x)).tanh())


torch.manual_seed(0)
x, y = regression()
model = Adapted()
model.adapters["ref"].load_state_dict(model.adapters["default"].state_dict())
model.adapters["ref"].requires_grad_(False)
if FAULTY:
    model.adapters.requires_grad_(False)
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.03)  # <- here
if not TWIN:  # the trainer switches to the policy's adapter before each forward
    model.adapters["default"].requires_grad_(True)

with watch(model):
    for inputs, targets in batches(x, y):
        model.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        note(loss)
