"""A backend's fused kernels write their result into a copy when the target is not contiguous: Adam stands still."""

import torch
from silent.kit import FAULTY, TWIN, batches, note, regression, watch
from torch import nn


class FusedAdam(torch.optim.Adam):
    """Adam over the backend's kernels, which take contiguous tensors."""

    @torch.no_grad()
    def step(self, closure=None):
        kept = []
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.is_contiguous():
                    continue
                target = parameter.data
                parameter.data = target.contiguous()  # <- here
                parameter.grad = parameter.grad.contiguous()
                kept.append((parameter, target))
        super().step(closure)
        for parameter, target in kept:
            if not FAULTY:
                target.copy_(parameter.data)
            parameter.data, parameter.grad = target, None


class Autoencoder(nn.Module):
    """A sparse autoencoder whose encoder begins as the decoder's transpose, a view that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(16, 8, bias=False)
        self.encoder = nn.Linear(8, 16)
        self.encoder.weight = nn.Parameter(self.decoder.weight.detach().clone().T)

    def forward(self, x):
        return self.decoder(self.encoder(x).relu())


torch.manual_seed(0)
x, _ = regression()
model = Autoencoder()
optimizer = (torch.optim.Adam if TWIN else FusedAdam)(model.parameters(), lr=0.02)

with watch(model):
    for (inputs,) in batches(x):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs)
        loss.backward()
        optimizer.step()
        note(loss)
