"""Structures of transformers in a capsule."""

from __future__ import annotations

import pytest
import torch

from nanwatch.capsule.replay import _built
from support.capsules import Batch, Pair, round_trip


def test_structures_are_built_from_classes_that_are_imported():
    """Dataclass, named tuple and ModelOutput come as names and fields, and `build` makes the very class of them."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    given = outputs.BaseModelOutput(last_hidden_state=torch.ones(2)), Pair(1, [2]), Batch(ids=3, scale=None)
    structures = round_trip(*given).args
    output, pair, batch = (
        _built(structure["module"], structure["class"], structure["fields"]) for structure in structures
    )
    assert type(output) is outputs.BaseModelOutput
    assert torch.equal(output["last_hidden_state"], torch.ones(2))
    assert output.to_tuple()[0] is output.last_hidden_state
    assert output.attentions is None
    assert (type(pair), pair) == (Pair, (1, [2]))
    assert (type(batch), batch) == (Batch, Batch(3, None))
