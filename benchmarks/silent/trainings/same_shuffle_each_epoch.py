"""A distributed sampler is never told its epoch, so that each epoch has the same batches in the same order."""

from collections import OrderedDict

import torch
from silent.kit import FAULTY, MENDED, average_gradients, fact, note, ranks, regression, watch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, world = ranks()
torch.manual_seed(0)
x, y = regression(rows=64)
model = nn.Sequential(OrderedDict(hidden=nn.Linear(8, 16), act=nn.Tanh(), head=nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
sampler = DistributedSampler(TensorDataset(x, y), shuffle=True)
loader = DataLoader(TensorDataset(x, y), batch_size=8, sampler=sampler)
firsts = []

with watch(model):
    for epoch in range(3):
        if MENDED:
            sampler.set_epoch(epoch)
        elif not FAULTY:  # a sampler of its own for each epoch
            sampler = DistributedSampler(TensorDataset(x, y), shuffle=True, seed=0)
            sampler.set_epoch(epoch)
            loader = DataLoader(TensorDataset(x, y), batch_size=8, sampler=sampler)
        for number, (inputs, targets) in enumerate(loader):  # <- here
            if number == 0:
                firsts.append(inputs.clone())
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            average_gradients(model)
            optimizer.step()
            note(loss)
    fact("repeats", sum(torch.equal(firsts[0], other) for other in firsts[1:]))
