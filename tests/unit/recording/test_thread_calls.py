"""The calls under way in a thread: outputs added to them, and what other threads see."""

from __future__ import annotations

import torch

from nanwatch.recording.thread_calls import Node, ThreadCalls


def test_a_call_that_ends_takes_the_outputs_added_to_it_and_inside_it() -> None:
    """In the order in which they were added; those of the call around it stay."""
    calls = ThreadCalls()
    for name in ("model", "block"):
        calls.nodes.append(Node(name, "Module", True, False))
    outer, first, second = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    calls.added += [(1, "o", outer), (2, "a", first), (3, "b", second)]
    assert calls.innermost == "block"
    calls.nodes.pop()
    taken = calls.take_added()
    assert [(role, label, len(x)) for role, label, x in taken] == [("output", "a", 2), ("output", "b", 3)]
    assert calls.take_added() == []
    calls.nodes.pop()
    assert [label for _, label, _ in calls.take_added()] == ["o"]
    assert calls.innermost is None
