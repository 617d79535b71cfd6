"""Labels and leaves of the values that transformers' models return."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanwatch.recording.walk import leaves

X, Y, Z = torch.zeros(1), torch.ones(2), torch.full((3,), 2.0)


@dataclass
class Output:
    """A plain dataclass."""

    logits: Tensor
    loss: Tensor | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Opaque:
    """An object nobody knows, with tensors inside, as a key-value cache is."""

    def __init__(self) -> None:
        self.keys = [X]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self.keys)


def test_model_outputs_are_mappings() -> None:
    """A transformers ModelOutput gives its keys, nested ones included, and not its empty fields."""
    from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput

    inner = BaseModelOutput(last_hidden_state=Y, hidden_states=(X, Z))
    output = Seq2SeqLMOutput(logits=X, encoder_hidden_states=(inner,))
    assert [label for label, _ in leaves(output, "output")] == [
        "output[logits]",
        "output[encoder_hidden_states][0][last_hidden_state]",
        "output[encoder_hidden_states][0][hidden_states][0]",
        "output[encoder_hidden_states][0][hidden_states][1]",
    ]


def test_a_cache_is_entered_where_the_call_made_it() -> None:
    """A key-value cache gives its tensors, and is one leaf where it was given; no object is iterated."""
    from transformers import DynamicCache

    assert leaves((Opaque(),), "output") == [("output[0][keys][0]", X)]
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, 1, 1), torch.ones(1, 1, 1, 1), 0)
    labels = [label for label, x in leaves({"cache": cache}, "output") if isinstance(x, Tensor)]
    assert labels == ["output[cache][layers][0][keys]", "output[cache][layers][0][values]"]
    assert leaves({"cache": cache}, "output", True, [cache]) == [("output[cache]", cache)]
    assert leaves(Output, "output") == [("output", Output)]
