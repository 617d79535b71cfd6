"""An incident: a report that is completed step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from nanwatch import NonFiniteError, watch
from nanwatch.diagnosis.incident import Incident


@pytest.fixture
def incident() -> Incident:
    """The incident of a norm that divides 0 by 0."""
    model = nn.LayerNorm(2, eps=0.0)
    with watch(model, rerun=False), pytest.raises(NonFiniteError) as caught:
        model(torch.zeros(1, 2))
    return Incident(caught.value.report)


def test_a_report_that_was_handed_out_stays_as_it_was(incident: Incident) -> None:
    """Each fact makes another report, with the frames of the first."""
    seen, text = incident.report, str(incident.report)
    incident.learn(operation="aten.div.Tensor", remarks=("one",))
    incident.remark("two", "three")
    assert str(seen) == text
    assert incident.finding is incident.report.finding
    assert (incident.finding.operation, incident.finding.remarks) == (
        "aten.div.Tensor",
        ("one", "two", "three"),
    )
    assert incident.report.frames is seen.frames


def test_after_its_batch_only_the_report_is_kept(incident: Incident) -> None:
    """The error's traceback and the snapshot of the call hold tensors."""
    call: Any = object()
    incident.call, incident.raised = call, NonFiniteError(incident.report)
    incident.let_go()
    assert (incident.call, incident.raised) == (None, None)
