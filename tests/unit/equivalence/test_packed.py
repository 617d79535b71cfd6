"""Calls of an engine that packs tokens: its rows by place, over chunks, decode and preemption."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nanwatch.equivalence.calls import ModuleCall, value
from nanwatch.equivalence.differences import sketches
from nanwatch.equivalence.packed import STRIDE, PackedRun, PackedStore, PackedTokens, Places, block_sizes

TOKENS = torch.arange(24.0).reshape(2, 6, 2)


class Head(nn.Module):
    """Computes in place of the part that it is given, as vLLM's LogitsProcessor."""

    def forward(self, head: nn.Linear, x: Tensor) -> Tensor:
        return nn.functional.linear(x, head.weight)


class Decoder(nn.Module):
    """Calls its forward past that of nn.Module, as vLLM's classes under `support_torch_compile`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def __call__(self, *args: Any) -> Any:
        return self.forward(*args)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x)
        return found


class Engine(nn.Module):
    """Model of an engine, whose logits are computed apart."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()
        self.lm_head = nn.Linear(3, 5, bias=False)
        self.processor = Head()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.model(x)
        return found


def served(steps: Sequence[Sequence[tuple[int, int, int]]]) -> dict[str, ModuleCall]:
    """Run an engine over these parts of requests, and return its merged calls by path."""
    torch.manual_seed(0)
    model, run = Engine(), PackedRun(1 << 20)
    with torch.no_grad(), run.recording(model):
        for parts in steps:
            run.step_begins(partial(Places.of, parts))
            hidden = model(torch.cat([TOKENS[r, first : first + n] for r, first, n in parts]))
            ends = torch.tensor([n for _, _, n in parts]).cumsum(0) - 1
            model.processor(model.lm_head, hidden[ends])
            run.step_ended()
    return {one.path: one for one in run.calls()}


def test_chunks_and_decode_make_one_call_of_each_module() -> None:
    """Its rows are in the order of the places, whatever the order of the steps."""
    calls = served([[(1, 0, 3), (0, 0, 2)], [(0, 2, 4), (1, 3, 1)], [(1, 4, 1), (0, 2, 1)]])
    layer = calls["model.layer"].inputs[0]
    assert layer.places is not None
    assert layer.places.tolist() == [*range(6), *(STRIDE + i for i in range(5))]
    assert torch.equal(layer.rows, torch.cat([TOKENS[0], TOKENS[1, :5]]))


def test_a_forward_past_the_call_is_seen_and_the_head_has_its_own_name() -> None:
    """The root holds both, and has the logits of each request's last token in each step."""
    calls = served([[(0, 0, 3), (1, 0, 2)]])
    assert set(calls) == {"", "model", "model.layer", "lm_head"}
    root, logits = calls[""], calls["lm_head"].outputs[0]
    assert logits.shape == (2, 5)
    assert logits.places is not None
    assert logits.places.tolist() == [2, STRIDE + 1]
    assert root.outputs == calls["lm_head"].outputs
    assert all(root.holds(one) for one in calls.values() if one is not root)


def test_what_has_no_row_for_a_token_is_not_kept() -> None:
    """Nor is an integer, nor anything outside a step."""
    store = PackedStore(1 << 20)
    assert store.keep(torch.ones(3, 2)) is None
    store.ask = lambda: Places.of([(0, 0, 3)])
    assert store.keep(torch.ones(2, 2)) is None
    assert store.keep(torch.ones(3, 2, dtype=torch.int64)) is None
    padded = store.keep(torch.ones(8, 2))
    assert padded is not None
    assert padded.shape == (3, 2)


def test_a_batch_of_one_with_heads_has_the_rows_of_an_engine() -> None:
    """Heads before tokens and after them make the same row."""
    store = PackedStore(1 << 20, lead=1)
    store.ask = lambda: Places.of([(0, 0, 5)])
    x = torch.randn(1, 5, 2, 3)
    one, other = store.keep(x), store.keep(x.transpose(1, 2))
    assert one is not None
    assert other is not None
    assert torch.equal(one.rows, x[0].reshape(5, 6))
    assert torch.equal(other.rows, one.rows)


def test_sketches_of_a_fused_projection_are_those_of_its_parts() -> None:
    """So q, k and v are compared also beyond the memory for whole rows."""
    fused = nn.Linear(4, 200)
    fused.output_sizes = [100, 60, 40]  # type: ignore[assignment]
    assert block_sizes(fused) == [100, 60, 40]
    store = PackedStore(0)
    store.ask = lambda: Places.of([(0, 0, 4)])
    x = torch.randn(4, 200)
    whole = store.keep(x, fused)
    parts = [store.keep(one) for one in x.split([100, 60, 40], -1)]
    assert whole is not None
    assert torch.equal(whole.rows, torch.cat([one.rows for one in parts if one is not None], -1))
    assert whole.rows.shape == (4, 96)


def test_rows_of_steps_before_the_memory_ended_are_sketched_with_the_others() -> None:
    """Block by block, so that a merged call has the sketches of its parts alone."""
    torch.manual_seed(0)
    fused = nn.Linear(4, 100)
    fused.output_sizes = [60, 40]  # type: ignore[assignment]
    run, x = PackedRun(2 * 116 * 4), torch.randn(3, 4)
    with torch.no_grad(), run.recording(fused):
        for first, count in ((0, 2), (2, 1)):
            run.step_begins(partial(Places.of, [(0, first, count)]))
            fused(x[first : first + count])
            run.step_ended()
    [call] = run.calls()
    kept = call.outputs[0]
    assert kept.is_sketch
    expected = torch.cat([sketches(one) for one in fused(x).detach().split([60, 40], -1)], -1)
    torch.testing.assert_close(kept.rows, expected)
    assert run.steps == {0: 0, 1: 0, 2: 1}


def test_tokens_are_compared_in_the_places_that_both_have() -> None:
    """A prefix cache leaves some out."""
    calls = served([[(0, 0, 4)]])
    cached = served([[(0, 2, 4)]])
    pair = PackedTokens().pair(calls["model"].outputs[0], cached["model"].outputs[0])
    assert pair is not None
    assert pair[0].shape == (2, 3)
    assert torch.equal(*pair)


def test_values_of_other_shapes_are_no_sum() -> None:
    """A run that measures the noise may be given other tensors than hidden and residual."""
    call = served([[(0, 0, 4)]])["model.layer"]
    call.inputs.append(call.outputs[0])
    assert value([call], "inputs", (0, 0)) is not None
    assert value([call], "inputs", (0, 1)) is None
