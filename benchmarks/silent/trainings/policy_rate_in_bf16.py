"""A policy trained with the usual 3e-6 of reinforcement learning, in bfloat16: more than 99 % of updates vanish."""

import torch
from silent.kit import FAULTY, MENDED, batches, fact, note, tokens, watch
from torch import nn


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 32)
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.head = nn.Linear(32, 32, bias=False)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


torch.manual_seed(0)
x, y = tokens()
model = Policy()
if FAULTY or MENDED:
    model = model.to(torch.bfloat16)  # <- here
master = [p.detach().float().requires_grad_() for p in model.parameters()]
trained = master if MENDED else list(model.parameters())
optimizer = torch.optim.AdamW(trained, lr=3e-6, betas=(0.9, 0.95), weight_decay=0.0)
start = [p.detach().clone() for p in trained]

with watch(model):
    for inputs, targets in batches(x, y, size=8):
        logits = model(inputs).float().log_softmax(-1)
        reward = (logits.argmax(-1) == targets).float() - 0.1
        loss = -(reward * logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)).mean()
        optimizer.zero_grad()
        model.zero_grad()
        loss.backward()
        if MENDED:
            for wide, parameter in zip(master, model.parameters(), strict=True):
                wide.grad = parameter.grad.float()
        optimizer.step()
        if MENDED:
            with torch.no_grad():
                for wide, parameter in zip(master, model.parameters(), strict=True):
                    parameter.copy_(wide)
        note(loss)
    moved = sum((p != old).sum().item() for p, old in zip(trained, start, strict=True))
    fact("moved", moved / sum(p.numel() for p in trained))
