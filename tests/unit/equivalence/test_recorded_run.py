"""File of a run, its weights as sketches and fingerprints, and which of them are stale."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import nanwatch
from nanwatch.equivalence.differences import sketches
from nanwatch.equivalence.packed import STRIDE, PackedRun, Places
from nanwatch.equivalence.recorded_run import RecordedRun, fingerprints, stale


def recorded(model: nn.Module) -> RecordedRun:
    run, places = PackedRun(1 << 20), Places.of([(0, 0, 3)])
    with torch.no_grad(), run.recording(model):
        run.step_begins(lambda: places)
        model(torch.randn(3, 4))
        run.step_ended()
    found = RecordedRun(
        "engine 1", tokens=[[5, 6, 7]], sampled=[1], logprobs=[[-1.0]], settings={"eps": 1e-5}
    )
    return found.take_calls(run)


def test_a_file_gives_back_the_run(tmp_path: Path) -> None:
    """Calls of one input share it, and modules stand in with class, settings and narrow weights as they are."""
    model = nn.Sequential(nn.LayerNorm(4, eps=1e-3), nn.Linear(4, 40), nn.Linear(40, 2))
    run = recorded(model)
    torch.save(run, tmp_path / "run.pt")
    read = torch.load(tmp_path / "run.pt", weights_only=False)
    assert (
        [one.key for one in read.calls]
        == [one.key for one in run.calls]
        == [("", 0), ("0", 0), ("1", 0), ("2", 0)]
    )
    assert read.calls[1].parent is read.calls[0]
    assert read.calls[1].outputs[0] is read.calls[2].inputs[0]
    assert (read.tokens, read.settings, read.dtype) == (run.tokens, run.settings, torch.float32)
    norm, first, second = (one.module for one in read.calls[1:])
    assert type(norm).__name__ == "LayerNorm"
    assert norm is not None
    assert norm.eps == 1e-3
    assert first is not None
    assert torch.equal(first._parameters["weight"], model[1].weight.detach())  # type: ignore[arg-type]
    assert second is not None
    assert torch.equal(second._parameters["weight"], sketches(model[2].weight.detach()).float())  # type: ignore[arg-type]
    assert read.sampled_places == [1]


def test_weights_that_vllm_packs_are_read_by_their_products() -> None:
    """Bit for bit, though it leaves an empty parameter behind."""
    model = nn.Sequential(nn.Linear(4, 6))
    prints, weight, layer = fingerprints(model), model[0].weight.detach(), cast(Any, model[0])
    layer.cpu_linear = lambda x, _, bias: nn.functional.linear(x, weight, bias)
    layer.input_size_per_partition, layer.weight = 4, nn.Parameter(torch.empty(0))
    layer.forward = lambda x: layer.cpu_linear(x, None, layer.bias)
    assert fingerprints(model) == prints
    module = recorded(model).calls[1].module
    assert module is not None
    assert torch.equal(module._parameters["weight"], weight)  # type: ignore[arg-type]


def test_rows_of_other_places_are_forgotten() -> None:
    """One tensor stays one."""
    run = recorded(nn.Sequential(nn.ReLU(), nn.ReLU()))
    run.restrict(torch.tensor([0, 2, STRIDE]))
    kept = run.calls[0].outputs[0]
    assert kept.places is not None
    assert kept.places.tolist() == [0, 2]
    assert kept.rows.shape == kept.shape == (2, 4)


def test_stale_weights_are_named_by_their_bits() -> None:
    """Those of a fused weight part by part, and padding of a vocabulary is none of it."""
    q, k, words = nn.Linear(3, 4, bias=False), nn.Linear(3, 2, bias=False), nn.Embedding(5, 3)
    trainer = nn.ModuleDict({"q": q, "k": k, "words": words})
    fused, padded = nn.Linear(3, 6, bias=False), nn.Embedding(8, 3)
    fused.output_sizes, padded.org_vocab_size = [4, 2], 5  # type: ignore[assignment]
    with torch.no_grad():
        fused.weight.copy_(torch.cat([q.weight, k.weight]))
        padded.weight[:5] = words.weight
    engine = nn.ModuleDict({"qk": fused, "words": padded})
    ours, theirs = fingerprints(trainer), fingerprints(engine)
    assert theirs["qk.weight"] == [nanwatch.fingerprint(q.weight), nanwatch.fingerprint(k.weight)]
    assert stale(ours, theirs) == []
    with torch.no_grad():
        fused.weight[5, 0] += 1
        padded.weight[4, 0] += 1
    assert stale(ours, fingerprints(engine)) == ["qk.weight (part 1 of 2)", "words.weight"]


def test_a_part_is_held_to_the_weight_in_its_place() -> None:
    """Though the bits of another layer's are in the trainer too."""
    ours = {"0.q.w": [1], "0.k.w": [2], "0.o.w": [3], "1.q.w": [4], "1.k.w": [5], "1.o.w": [6]}
    assert stale(ours, {"0.qk.w": [1, 2], "0.o.w": [3], "1.qk.w": [4, 5]}) == []
    assert stale(ours, {"0.qk.w": [1, 5], "0.o.w": [6], "1.qk.w": [2, 5], "1.o.w": [6]}) == [
        "0.qk.w (part 1 of 2)",
        "0.o.w",
        "1.qk.w (part 0 of 2)",
    ]
