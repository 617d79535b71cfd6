"""Bad data of a DataLoader: the sample of its dataset, and the line that made it with a cure, if it is not held."""

import linecache
import sys
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

from nanwatch.diagnosis.isolation import can_fork
from support.toys import fault_of
from support.watching import watch

pytestmark = pytest.mark.skipif(not can_fork(), reason="a child process alone reads a sample again")
BAD = 23


class Rows:
    def __init__(self, way: str) -> None:
        self.way, self.rows = way, np.ones((40, 3), dtype="float32")
        self.rows[BAD] = np.nan if way == "held" else 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        mask = np.full(3, -np.inf)  # bad in each sample
        row = self.rows[i]  # held
        if self.way == "numpy":
            row = row / row.sum()  # numpy
        x = torch.from_numpy(row) + torch.exp(torch.from_numpy(mask)).float()
        if self.way == "pole":
            x = x.log()  # pole
        return x / x.sum() if self.way == "torch" else x, i  # torch


def normalised(rows: list[Any]) -> Any:
    x, i = default_collate(rows)
    return x / x.sum(1, keepdim=True), i  # collate


def train(model: nn.Module, loader: Any, *, is_bound_anew: bool = False) -> None:
    for x, _ in loader:
        if is_bound_anew:
            x = x / x.sum(1, keepdim=True)
        model(x)


@pytest.mark.parametrize("way", ["torch", "numpy", "collate", "held", "pole"])
def test_the_sample_of_bad_data(way: str) -> None:
    """It is found among those drawn last, with a cure but for a pole. A mask that each sample has is not meant."""
    torch.manual_seed(29)  # in its third batch of seven, when workers have drawn all
    collate, num_workers = (normalised, 2) if way == "collate" else (None, 0)
    loader = DataLoader(Rows(way), 6, shuffle=True, num_workers=num_workers, collate_fn=collate)
    with watch(model := nn.Linear(3, 1)):
        finding = fault_of(train, model, loader).finding
    words = " ".join(finding.remarks)
    assert f"sample {BAD} of the dataset (Rows)" in words
    assert [cure.works for cure in finding.cures] == [True] * (way in ("torch", "collate"))
    place = words.partition("` at ")[2].partition(" is bad")[0] if way == "held" else str(finding.source)
    assert linecache.getline(__file__, int(place.rpartition(":")[2])).endswith(f"# {way}\n")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="it does not know where in its line a call is")
def test_a_name_that_is_bound_anew() -> None:
    """The batch is drawn again for the statement, known by its labels."""
    with watch(model := nn.Linear(3, 1)):
        loader = DataLoader(Rows(""), 6, shuffle=True)
        finding = fault_of(train, model, loader, is_bound_anew=True).finding
    assert (finding.operation, finding.cures[0].works) == ("aten.div.Tensor", True)
