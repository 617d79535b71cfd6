"""A dataset makes its random generator once; each loader worker, and each epoch, gets a copy in the same state."""

from collections import OrderedDict

import numpy
import torch
from silent.kit import FAULTY, TWIN, fact, note, regression, watch
from torch import nn
from torch.utils.data import DataLoader, Dataset, get_worker_info

x, y = regression(rows=64)


class Noisy(Dataset):
    """Rows with random noise on them, and the noise itself."""

    def __init__(self):
        self.random = numpy.random.default_rng(0)  # <- here
        self.fresh = False

    def __len__(self):
        return len(x)

    def __getitem__(self, row):
        info = get_worker_info()
        if not FAULTY and not self.fresh:
            self.random, self.fresh = numpy.random.default_rng(info.seed if info else 0), True
        noise = torch.from_numpy(self.random.normal(0, 0.1, 8).astype("float32"))
        return x[row] + noise, y[row], noise


torch.manual_seed(0)
model = nn.Sequential(OrderedDict(hidden=nn.Linear(8, 16), act=nn.Tanh(), head=nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Noisy(), batch_size=16, num_workers=0 if TWIN else 2, shuffle=True)
seen = []

with watch(model):
    for _ in range(3):
        for inputs, targets, noise in loader:
            seen.append(noise)
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            note(loss)
    fact("repeats", sum(torch.equal(a, b) for i, a in enumerate(seen) for b in seen[:i]))
