"""Random trees of modules that call each other with random tensors and structures."""

import math
import random
from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from nanwatch.recording.walk import leaves

DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
    *(torch.int8, torch.int64, torch.uint8, torch.bool),
]


Pair = namedtuple("Pair", "left right")


@dataclass
class Plain:
    """A dataclass, as some models return."""

    first: Any = None
    rest: list[Any] = field(default_factory=list)


@dataclass
class Answer(ModelOutput):
    """Output class as models of transformers have it; a field that is None is left out."""

    loss: Any = None
    logits: Any = None
    hidden: Any = None


class Chance:
    """Random tensors and structures; the same for the same seed."""

    def __init__(self, seed: int, poison: float) -> None:
        self.random = random.Random(seed)
        self.poison = poison

    def tensor(self) -> Tensor:
        rng = self.random
        dtype = rng.choice(DTYPES)
        shape = rng.choice([(), (1,), (0,), (3,), (2, 3), (4, 0, 2), (2, 1, 5)])
        x = torch.tensor([rng.randint(0, 60) for _ in range(math.prod(shape))]).reshape(shape)
        x = (x / 4 if dtype.is_floating_point or dtype.is_complex else x).to(dtype)
        if x.numel() and rng.random() < self.poison and dtype.itemsize > 1 and dtype.is_floating_point:
            x.view(-1)[rng.randrange(x.numel())] = rng.choice([math.nan, math.inf, -math.inf])
        view = rng.choice(["", "", "t", "expand", "step", "grad"])
        if view == "t":
            return x.t() if x.dim() == 2 else x
        if view == "expand":
            return x.unsqueeze(0).expand(3, *shape)
        if view == "step" and x.dim():
            return x[::2]
        return x.requires_grad_() if view == "grad" and dtype == torch.float32 else x

    def value(self, known: list[Tensor], depth: int = 0) -> Any:
        rng = self.random
        kinds = ["known", "tensor", "scalar"] + (["container"] * 3 if depth < 3 else [])
        kind = rng.choice(kinds)
        if kind == "known" and known:
            return rng.choice(known)
        if kind == "scalar":
            return rng.choice([None, 3, 2.5, "text", b"raw", True, object, range(2), torch.float16])
        if kind != "container":
            known.append(self.tensor())
            return known[-1]
        items = [self.value(known, depth + 1) for _ in range(rng.randint(0, 4))]
        keys = rng.sample(["logits", "loss", "a key", "ü", "x.y", "0"], len(items))
        make = rng.choice([tuple, list, dict, "keyed", OrderedDict, UserDict, Plain, Answer, Pair, "mixed"])
        if make in (dict, OrderedDict, UserDict):
            return make(zip(keys, items, strict=True))
        if make == "keyed":
            return dict(zip([(1, 2), 3, None, "k"], items, strict=False))
        if make is Plain:
            return Plain(items[0] if items else None, items[1:])
        if make is Answer:
            # transformers would take a first field that is no tensor for pairs of keys and values.
            first = [item for item in items if isinstance(item, torch.Tensor)][:1]
            return Answer(*first, *[item for item in items[1:3] if item is not None and first])
        if make is Pair:
            return Pair(items, None)
        return [*items, tuple(items)] if make == "mixed" else make(items)


class Branch(nn.Module):
    """Calls some of its children, now and then more than once, with random arguments, and returns something."""

    def __init__(self, chance: Chance, calls: int) -> None:
        super().__init__()
        self.chance, self.calls = chance, calls
        self.again: list[Branch] = []  # calls itself through this, no child
        if chance.random.random() < 0.5:
            self.weight = nn.Parameter(torch.tensor([chance.random.random(), 2.0]))
        if chance.random.random() < 0.3:
            self.register_buffer("table", torch.arange(3.0) + 1)
            self.register_buffer("count", torch.tensor(3))

    def forward(self, *args: Any, depth: int = 0, **kwargs: Any) -> Any:
        chance = self.chance
        known = [x for _, x in leaves((args, kwargs), "") if isinstance(x, Tensor)]
        children = [child for child in self.children() if isinstance(child, Branch)] + self.again
        for _ in range(self.calls if depth < 4 else 0):
            if not children:
                break
            arguments = [chance.value(known) for _ in range(chance.random.randint(0, 2))]
            keywords = {"mask": chance.value(known)} if chance.random.random() < 0.4 else {}
            result = chance.random.choice(children)(*arguments, depth=depth + 1, **keywords)
            known += [x for _, x in leaves(result, "") if isinstance(x, Tensor)]
        if known and chance.random.random() < 0.2:
            x = chance.random.choice(known)
            if x.dtype == torch.float32 and not x.requires_grad and x.is_contiguous() and x.numel() > 1:
                x.mul_(2)
        return chance.value(known)


def tree(seed: int, poison: float) -> Branch:
    """A tree of up to a dozen modules, some of them shared, some calling themselves."""
    chance = Chance(seed, poison)
    rng = chance.random
    modules = [Branch(chance, rng.randint(1, 3)) for _ in range(rng.randint(1, 8))]
    for number, module in enumerate(modules[1:], 1):
        for parent in rng.sample(modules[:number], min(number, rng.choice([1, 1, 2]))):
            parent.add_module(f"m{number}", module)
    if rng.random() < 0.5:
        again = rng.choice(modules)
        again.again.append(again)
    return modules[0]


def run(model: nn.Module, seed: int) -> None:
    assert isinstance(model, Branch)
    for batch in range(2):
        model.chance.random.seed(seed + batch)
        model(model.chance.tensor(), {"again": [model.chance.tensor()]}, mask=None)
