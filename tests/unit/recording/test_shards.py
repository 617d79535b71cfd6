"""A DTensor's record says which shard was read, wherever the record goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nanwatch.recording.observe import parameter_mesh
from nanwatch.report.report import Report
from nanwatch.session.api import watch
from support.toys import Scale

NOTE = "local shard: Shard(dim=0) at mesh[0]=0 of 1"


@pytest.fixture(name="x")
def sharded(one_process_mesh: Any) -> Any:
    """A DTensor of two dimensions with an inf at [1, 2]."""
    from torch.distributed.tensor import Shard, distribute_tensor

    whole = torch.ones(2, 3)
    whole[1, 2] = float("inf")
    return distribute_tensor(whole, one_process_mesh, [Shard(0)])


def test_report_in_all_forms_says_which_shard(x: Any) -> None:
    """Text, JSON and its way back, and the page; the finding has the place in the shard."""
    model = Scale()
    with watch(model, on_nonfinite="record") as w:
        model(x)
    report = w.report()
    record = report.frames[0].records[0]
    assert (str(record.note), record.shape) == (NOTE, (2, 3))
    text = report.to_text()
    assert f"input[0] ({NOTE})" in text
    assert "the first at [1, 2]; " in text
    assert f"the {NOTE} of float32 of shape [2, 3]" in text
    assert Report.from_json(report.to_json()) == report


def test_parameters_say_where_this_process_is_in_their_meshes(x: Any) -> None:
    """Each dimension once, also while FSDP has plain tensors in their place; nothing without a model or a mesh."""
    model = nn.Sequential(nn.Linear(3, 2), Scale(), nn.Linear(3, 2))
    assert parameter_mesh(model) == ()
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(x)
    assert parameter_mesh(model) == ("mesh[0]=0 of 1",)
    with watch(model) as w:
        model[1](torch.ones(1))
        assert "This rank in the device mesh: mesh[0]=0 of 1." in w.report().to_text()
    for layer in (model[0], model[2]):
        layer.weight = nn.Parameter(torch.ones(2, 2))
    assert parameter_mesh(model) == ("mesh[0]=0 of 1",)
    assert parameter_mesh(None) == ()
