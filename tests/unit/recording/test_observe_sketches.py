"""`watch(sketches=N)`: the outputs of every N-th batch have sketches in the trace, and `diff` compares them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.numerics._fingerprint import sketch
from nanwatch.recording import observe
from nanwatch.trace.comparison import diff
from nanwatch.trace.trace_file import Trace
from support.recorders import RECORDERS, WITH_DEVICE, watched

pytest.importorskip("pyarrow.parquet")


class Outputs(nn.Module):
    """Returns tensors of many kinds, the first of which the caller overwrites."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        return {
            "hidden": x * 1,
            "strided": x.transpose(0, 1),
            "half": x.half(),
            "number": x.sum(),
            "nan": x / (x[:1] != x[:1]).float() / 0,
            "integer": x.long(),
            "complex": torch.complex(x, x),
            "empty": x[:0],
            "none": None,
        }


class Caller(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Outputs()

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.inner(x)["hidden"]
        return hidden.add_(1)


def expected_of(model: Caller, batches: list[Tensor]) -> list[dict[str, bytes | None]]:
    """The sketches by label of each batch, from what hooks saw."""
    found: list[dict[str, bytes | None]] = []

    def inner(_: nn.Module, args: Any, output: dict[str, Any]) -> None:
        found.append({f"output[{key}]": bytes_of(value) for key, value in output.items()})

    def outer(_: nn.Module, args: Any, output: Tensor) -> None:
        found[-1]["output"] = bytes_of(output)

    hooks = [model.inner.register_forward_hook(inner), model.register_forward_hook(outer)]
    for x in batches:
        model(x)
    for hook in hooks:
        hook.remove()
    return found


def bytes_of(value: Any) -> bytes | None:
    if not (isinstance(value, Tensor) and value.is_floating_point() and value.numel()):
        return None
    mantissa, exponent = torch.frexp(sketch(value))
    scale = 2.0 ** {torch.bfloat16: 11, torch.float16: 13}.get(value.dtype, 24)
    return torch.ldexp((mantissa * scale).trunc() / scale, exponent).numpy().tobytes()


@pytest.mark.parametrize("recorder", WITH_DEVICE)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_trace_has_the_sketches_of_chosen_batches(tmp_path: Path, recorder: str, mode: Any) -> None:
    """Each floating-point output has one, as it was when its module returned; nothing else has, and no other batch."""
    model = Caller()
    torch.manual_seed(0)
    batches = [torch.randn(3, 5, 20) for _ in range(5)]
    path = tmp_path / "run.parquet"
    with mode(), watched(model, recorder, trace=path, sketches=2, on_nonfinite="record") as watch:
        for x in batches:
            model(x)
        frames = watch.frames
    with mode():
        expected = expected_of(model, batches)
    table = Trace.open(path).table(["batch", "role", "label", "sketch"]).to_pylist()
    assert {row["batch"] for row in table} == set(range(5))
    for row in table:
        wanted = expected[row["batch"]][row["label"]] if row["role"] == "output" else None
        assert row["sketch"] == (wanted if row["batch"] % 2 == 0 else None), row["label"]
    assert Trace.open(path).sketched_batches == (0, 2, 4)
    assert Trace.open(path).frames(0) == frames[:2]


@pytest.mark.parametrize("recorder", RECORDERS)
def test_a_sketch_is_kept_no_longer_than_needed(tmp_path: Path, recorder: str) -> None:
    """The rows in the recorder's ring have none once the trace has taken it."""
    model = Caller()
    with watched(model, recorder, trace=tmp_path / "run.parquet", sketches=1, on_nonfinite="record") as watch:
        model(torch.randn(3, 5, 20))
    rows = [row for frame in watch._recorder.frames() for row in frame.records]
    assert any(isinstance(row, observe.SketchedRow) for row in rows)
    assert not any(map(observe.sketch_bytes, rows))


class Block(nn.Module):
    """A residual block whose sum is made outside the module `hidden`, or inside it."""

    def __init__(self, adds_inside: bool) -> None:
        super().__init__()
        self.adds_inside = adds_inside
        self.hidden = Hidden(adds_inside)
        self.embed = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        residual = self.embed(x)
        hidden: Tensor = self.hidden(residual)
        return hidden if self.adds_inside else hidden + residual


class Hidden(nn.Module):
    def __init__(self, adds: bool) -> None:
        super().__init__()
        self.adds = adds
        self.linear = nn.Linear(24, 24)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + x if self.adds else self.linear(x)


def traced(path: Path, model: nn.Module, x: Tensor) -> Path:
    with watched(model, "python", trace=path, sketches=2, on_nonfinite="record"), torch.no_grad():
        for _ in range(3):
            model(x)
    return path


def sketch_in(path: Path, module: str) -> Tensor:
    rows = Trace.open(path).table(["module", "role", "sketch"], [0]).to_pylist()
    (found,) = [row["sketch"] for row in rows if (row["module"], row["role"]) == (module, "output")]
    return torch.frombuffer(bytearray(found), dtype=torch.float32).view(-1, 32)


def test_hidden_is_set_against_hidden_plus_residual(tmp_path: Path) -> None:
    """From two traces: the module that adds the residual itself, and the one whose caller does."""
    torch.manual_seed(0)
    apart, together = Block(False), Block(True)
    together.load_state_dict(apart.state_dict())
    x = torch.randn(2, 7, 24)
    one, other = traced(tmp_path / "a.parquet", apart, x), traced(tmp_path / "b.parquet", together, x)
    total = sketch_in(one, "hidden") + sketch_in(one, "embed")
    torch.testing.assert_close(total, sketch_in(other, "hidden"), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(sketch_in(one, "hidden"), sketch_in(other, "hidden"), atol=0.1)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2**-10), (torch.float16, 2**-12)])
def test_sketches_of_halves_are_short_and_close_enough(
    tmp_path: Path, dtype: torch.dtype, bound: float
) -> None:
    """Low bits are zeros. The error of a single rounding is found within 20 %, and a nan is never a number."""
    torch.manual_seed(0)
    exact = torch.randn(512, 96, dtype=torch.float64)
    x = exact.to(dtype)
    x[7, 3], x[8, 3] = torch.nan, torch.inf
    found = sketch_in(traced(tmp_path / "a.parquet", nn.Identity(), x), "")
    whole = sketch(x.double())
    good = torch.ones(512, dtype=torch.bool)
    good[7:9] = False
    assert not found[~good].isfinite().any()
    assert not torch.frexp(found[good])[0].mul(2 / bound).frac().any()
    assert torch.frexp(found[good])[0].mul(1 / bound).frac().any()
    assert ((found - whole)[good].abs() <= bound * whole[good].abs()).all()
    # The same numbers rounded another way.
    toward = torch.where(x.double() < exact, torch.inf, -torch.inf).to(dtype)
    other = torch.where(torch.rand(512, 96) < 0.5, torch.nextafter(x, toward), x)
    error = sketch_in(traced(tmp_path / "b.parquet", nn.Identity(), other), "") - found
    truth = (other.double() - x.double())[good].norm() / x.double()[good].norm()
    assert float(error[good].norm() / found[good].norm()) == pytest.approx(float(truth), rel=0.2)


def test_diff_says_how_far_the_rows_are_apart(tmp_path: Path) -> None:
    """At the first output that differs, though a weight without a sketch differs before it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 48), nn.Linear(48, 48))
    x = torch.randn(2, 150, 48)
    before = traced(tmp_path / "a.parquet", model, x)
    outputs = [model(x).detach()]
    with torch.no_grad():
        model[1].weight += 0.02 * torch.randn(48, 48)
    outputs.append(model(x).detach())
    found = diff(before, traced(tmp_path / "b.parquet", model, x))
    assert found.first is not None
    assert (found.first.label, found.first.rows) == ("weight", None)
    assert found.sketched is not None
    assert (found.sketched.module, found.sketched.label, found.sketched.batch) == ("1", "output", 0)
    rows = found.sketched.rows
    assert rows is not None
    a, b = outputs
    by_row = (sketch(b - a).norm(dim=-1) / sketch(a).norm(dim=-1)).view(2, 150)
    assert rows.num_rows == 300
    assert rows.relative_error == pytest.approx(float((b - a).norm() / a.norm()), rel=0.2)
    assert rows.worst_relative_error == pytest.approx(float(by_row.max()), rel=1e-4)
    assert rows.worst_row == divmod(int(by_row.argmax()), 150)
    assert rows.cosine == pytest.approx(
        float(nn.functional.cosine_similarity(a.ravel(), b.ravel(), 0)), abs=0.01
    )
    assert rows.worst_cosine <= rows.cosine
    told = json.loads(found.to_json())["sketched"]
    assert (told["module"], told["rows"]["worst_row"]) == ("1", list(rows.worst_row))
    assert (
        f"First with sketches: `output` of 1 (Linear) in batch 0: {found.sketched.what}; {rows}"
        in found.to_text()
    )
    assert diff(before, before).sketched is None
    assert "sketched" not in json.loads(diff(before, before).to_json())
