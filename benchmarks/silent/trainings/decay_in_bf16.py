"""An AdamW for bfloat16 rounds its update at random but applies the weight decay in bfloat16, where it vanishes."""

import torch
from silent.kit import FAULTY, TWIN, batches, fact, note, regression, watch
from torch import nn


class RoundingAdamW(torch.optim.AdamW):
    """AdamW with float32 arithmetic and stochastic rounding of the new weight."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                if FAULTY:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])  # <- here
                new = self.updated(parameter, group)
                if not FAULTY:
                    new -= group["lr"] * group["weight_decay"] * parameter.float()
                noise = torch.randint(1 << 16, new.shape, dtype=torch.int32)
                bits = (new.contiguous().view(torch.int32) + noise) & -65536
                parameter.copy_(bits.view(torch.float32))

    def updated(self, parameter, group):
        state, gradient = self.state[parameter], parameter.grad.float()
        if not state:
            state.update(
                step=torch.tensor(0.0),
                exp_avg=torch.zeros_like(gradient),
                exp_avg_sq=torch.zeros_like(gradient),
            )
        first, second = group["betas"]
        state["step"] += 1
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].lerp_(gradient.square(), 1 - second)
        scale = (1 - second ** state["step"].item()) ** 0.5 / (1 - first ** state["step"].item())
        denominator = state["exp_avg_sq"].sqrt() + group["eps"]
        return parameter.float() - group["lr"] * scale * state["exp_avg"] / denominator


torch.manual_seed(0)
x, y = regression(outputs=64)
model = nn.Sequential(nn.Linear(8, 256), nn.Tanh(), nn.Linear(256, 64))
if TWIN:  # decay in float32, on weights in float32
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1.0)
else:
    model, x = model.to(torch.bfloat16), x.to(torch.bfloat16)
    optimizer = RoundingAdamW(model.parameters(), lr=1e-3, weight_decay=1.0)
start = [p.detach().float().clone() for p in model.parameters()]

with watch(model):
    for inputs, targets in batches(x, y):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs).float(), targets)
        loss.backward()
        optimizer.step()
        note(loss)
    moved = sum(((p.float() - old) * old).sum() for p, old in zip(model.parameters(), start, strict=True))
    fact("decay", -moved / sum(old.square().sum() for old in start))
