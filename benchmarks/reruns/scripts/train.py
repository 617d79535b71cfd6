"""A script whose loop stands at the top of the file."""

from collections import Counter

import torch
from reruns.case import NonFinite, ends, tell, watch
from torch import nn

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
watch(model, gradients=True)
seen, losses, best = Counter(), [], None

for epoch in range(2):
    for i in range(3):
        x, mask = torch.randn(3, 4), torch.full((3,), float((epoch, i) != (1, 1)))
        optimizer.zero_grad()
        out = model(x)
        seen[i] += 1
        kept = out.square().mean(-1) * mask
        losses.append(kept.detach().sum().item())
        kept.clamp_(max=100.0)
        loss = kept.sum() / mask.sum()  # FAULT
        try:
            loss.backward()
            optimizer.step()
        except NonFinite as error:
            tell(error)
            continue
        best = loss.item() if best is None else min(best, loss.item())

state = {"seen": {str(k): v for k, v in seen.items()}, "losses": losses, "best": best, **ends(model)}
