"""A rewritten attention passes its rate of dropout whether or not the module trains."""

import torch
from silent.kit import FAULTY, TWIN, batches, fact, note, regression, watch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.dropout = 0.2

    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, -1)
        if TWIN:
            weights = (query @ key.mT / x.shape[-1] ** 0.5).softmax(-1)
            return nn.functional.dropout(weights, self.dropout, self.training) @ value
        rate = self.dropout if FAULTY or self.training else 0.0  # <- here
        return nn.functional.scaled_dot_product_attention(query, key, value, dropout_p=rate)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention(8)
        self.head = nn.Linear(8, 1)

    def forward(self, x):
        return self.head(self.attention(x)).mean(1)


torch.manual_seed(0)
x, y = regression(rows=256)
x, y = x.view(64, 4, 8), y.view(64, 4).mean(1, keepdim=True)
model = Reader()
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)

with watch(model):
    for step, (inputs, targets) in enumerate(batches(x, y)):
        model.train()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        note(loss)
        if step % 4 == 3:
            model.eval()
            with torch.no_grad():
                fact("noise", (model(x) - model(x)).abs().max())
