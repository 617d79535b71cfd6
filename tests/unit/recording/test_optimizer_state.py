"""Tensors of an optimizer, by name."""

from __future__ import annotations

import torch

from nanwatch.recording.optimizer_state import state_tensors


def test_each_tensor_has_its_parameters_name() -> None:
    """A parameter that the model does not know is named by its place, and comes itself."""
    known, copy = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.Adam([known, copy])
    for x in (known, copy):
        x.grad = torch.ones(2)
    optimizer.step()
    found = {one.label: one for one in state_tensors(optimizer, {id(known): "fc.weight"})}
    parts = ("step", "exp_avg", "exp_avg_sq")
    assert set(found) == {*(f"{p}[fc.weight]" for p in parts), *(f"{p}[0][1]" for p in parts), "param[0][1]"}
    assert found["exp_avg[fc.weight]"].tensor is optimizer.state[known]["exp_avg"]
    assert [label for label, one in found.items() if one.is_parameter] == ["param[0][1]"]
    assert found["param[0][1]"].tensor is found["exp_avg[0][1]"].parameter is copy
