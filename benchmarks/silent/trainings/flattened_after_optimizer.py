"""A wrapper flattens each layer's weights into one new parameter, after the optimizer took the old ones."""

import torch
from silent.kit import FAULTY, TWIN, batches, note, regression, watch
from torch import nn


class Flat(nn.Module):
    """A linear layer whose weight and bias are views of one flat parameter."""

    def __init__(self, linear):
        super().__init__()
        self.shape = linear.weight.shape
        self.flat = nn.Parameter(torch.cat([linear.weight.detach().flatten(), linear.bias.detach()]))

    def forward(self, x):
        weight, bias = self.flat.split([self.shape.numel(), self.shape[0]])
        return nn.functional.linear(x, weight.view(self.shape), bias)


def prepare(model):
    for name, child in list(model.named_children()):
        if isinstance(child, nn.Linear):
            setattr(model, name, Flat(child))
    return model


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.hidden = nn.Linear(8, 16)
        self.head = nn.Linear(16, 1)

    def forward(self, x):
        return self.head(self.hidden(x).tanh())


torch.manual_seed(0)
x, y = regression()
model = Net()
if TWIN:
    prepare(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
else:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)  # <- here
    prepare(model)
    if not FAULTY:
        optimizer.param_groups.clear()
        optimizer.add_param_group({"params": list(model.parameters())})

with watch(model):
    for inputs, targets in batches(x, y):
        model.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        note(loss)
