"""Records, notes, frames, and headroom against decimal logarithms, every code of the 8-bit formats and brute force."""

from decimal import Decimal, localcontext
from math import inf, nan
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nanwatch.numerics.formats import limits
from nanwatch.records.record import (
    NOTE_KINDS,
    Frame,
    Note,
    NoteKind,
    Record,
    by_module,
    event_frame,
    has_vanished,
    headroom_bits,
    shrinking,
)  # fmt: skip

FORMATS = (
    *("float64", "float32", "float16", "bfloat16"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def record(abs_max: float | None, dtype: str = "float16", role: Any = "output", **more: Any) -> Record:
    finite = None if abs_max is None else abs_max < inf
    return Record(more.pop("label", role), role, (2,), dtype, abs_max, abs_max, finite, None, **more)


@pytest.mark.parametrize("name", FORMATS)
def test_limits_are_those_of_the_format(name: str) -> None:
    """The ends agree with torch.finfo, and the smallest number with the lowest code above zero."""
    dtype = getattr(torch, name)
    ends, info = limits(name), torch.finfo(dtype)
    code = 0 if name == "float8_e8m0fnu" else 1  # e8m0 has no zero: its code 0 is a number
    smallest = torch.tensor([code], dtype=_WORDS[dtype.itemsize]).view(dtype).double().item()
    assert ends == (info.max, info.smallest_normal, smallest)
    if dtype.itemsize == 1:  # all 256 codes
        values = torch.arange(256, dtype=torch.uint8).view(dtype).double().abs()
        finite = values[values.isfinite() & (values > 0)]
        assert (ends.largest, ends.smallest_subnormal) == (finite.max(), finite.min())


@pytest.mark.parametrize("name", ["int8", "int64", "uint16", "bool", "", "quint8", "float4_e2m1fn_x2"])
def test_what_does_not_overflow_has_no_limits(name: str) -> None:
    assert limits(name) is None
    assert headroom_bits(record(3.0, name)) is None


@pytest.mark.parametrize("name", FORMATS)
@given(data=st.data())
def test_headroom_is_the_number_of_doublings_left(name: str, data: st.DataObject) -> None:
    """Headroom equals the logarithm of the quotient, taken with fifty digits."""
    ends = limits(name)
    abs_max = data.draw(st.floats(ends.smallest_subnormal, ends.largest))
    bits = headroom_bits(record(abs_max, name))
    with localcontext() as context:
        context.prec = 50
        exact = (Decimal(ends.largest) / Decimal(abs_max)).ln() / Decimal(2).ln()
    assert bits >= 0
    assert abs(Decimal(bits) - exact) <= Decimal("1e-12")


@pytest.mark.parametrize(
    ("made", "bits"),
    [
        (record(65504.0), 0.0),
        (record(32752.0), 1.0),
        (record(448.0, "float8_e4m3fn"), 0.0),
        (record(inf), -inf),
        (record(nan), -inf),
        (record(0.0), inf),
        (record(None), None),
        (record(inf, role="input", note=Note("mask")), None),
        (record(65504.0, role="input", note=Note("mask")), None),  # a mask made with the lowest finite number
        (record(inf, note=Note("allowed")), None),
        (record(65504.0, note=Note("local_shard")), 0.0),
    ],
)
def test_ends_and_exceptions(made: Record, bits: float | None) -> None:
    assert headroom_bits(made) == bits


def frame(name: str, *records: Record, batch: int = 0) -> Frame:
    return Frame(batch, name, "Linear", records)


def output(name: str, bits: float, dtype: str = "float16", batch: int = 0) -> Frame:
    """A frame whose output has exactly this much headroom."""
    ends = limits(dtype)
    return frame(name, record(ends.largest * 2.0**-bits, dtype), batch=batch)


FAULT = frame("bad", record(inf))


def test_modules_are_sorted_worst_first() -> None:
    """Each module has its least headroom over all calls; what it is given counts only as a fault."""
    frames = [
        frame("a", record(65504.0, role="input"), record(16376.0)),
        frame("a", record(4094.0)),
        frame("ids", record(7.0, "int64")),
        frame("given", record(nan, role="input"), record(1.0)),
        frame("b", record(32752.0, role="weight"), record(0.0)),
    ]
    worst = [(least.module, least.bits) for least in by_module(frames).values()]
    assert worst == [("given", -inf), ("b", 1.0), ("a", 2.0)]


@pytest.mark.parametrize(
    "before",
    [
        [output("a", 9, batch=1), output("b", 1)],
        [output("a", 120, "float32"), output("b", 1)],
        [frame("a", record(0.0)), output("b", 1)],
        [frame("a", record(None)), output("b", 1)],
    ],
)
def test_no_run(before: list[Frame]) -> None:
    assert shrinking([*before, FAULT]) == ""


def longest(bits: list[float]) -> tuple[int, int] | None:
    """By definition: the longest tail in which nothing recovers by more than a bit, from its last highest point."""
    starts = [
        s
        for s in range(len(bits))
        if all(bits[j] - bits[i] <= 1 for i in range(s, len(bits)) for j in range(i, len(bits)))
    ]
    if not starts:
        return None
    tail = bits[min(starts) :]
    start = max(i for i in range(len(bits)) if i >= min(starts) and bits[i] == max(tail))
    return (start, len(bits) - 1) if bits[start] - bits[-1] > 1 else None


@given(st.lists(st.integers(0, 12).map(lambda n: n / 2), max_size=12))
def test_runs_agree_with_their_definition(bits: list[float]) -> None:
    """On any sequence the one pass backwards finds what trying every start finds."""
    run = shrinking([*(output(str(i), b) for i, b in enumerate(bits)), FAULT])
    expected = longest(bits)
    if expected is None or bits[-1] > 8:  # from where a square leaves float16
        assert run == ""
    else:
        start, end = expected
        fell = f"fell from {bits[start]:.1f} bits at {start} to {bits[end]:.1f} bits at {end}"
        assert run == f"headroom in float16 {fell} over {end - start + 1} frames."


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float32", "float64"])
def test_only_what_is_zero_or_subnormal_has_vanished(name: str) -> None:
    """The smallest normal number, by torch, is where it begins."""
    normal = torch.finfo(getattr(torch, name)).smallest_normal
    assert not has_vanished(record(normal, name))
    assert has_vanished(record(normal / 2, name))
    assert has_vanished(record(0.0, name))
    assert not has_vanished(record(0.0, name)._replace(shape=(0, 3)))
    assert not has_vanished(record(nan, name))


@pytest.mark.parametrize("kind", NOTE_KINDS)
def test_only_what_is_meant_or_not_taken_is_no_fault(kind: NoteKind) -> None:
    record = Record("output", "output", (1,), "float32", 0.0, 1.0, False, None, Note(kind))
    assert record.is_fault == (kind not in ("mask", "allowed", "absorbed", "skipped_step", "not_taken"))


@pytest.mark.parametrize(
    ("label", "role"),
    [
        ("weight.grad", "gradient"),
        ("gradients", "gradient"),
        ("input[0]", "input"),
        ("output.logits", "output"),
        ("loss", "output"),
        ("attention logits of head 3", "output"),
        ("exp_avg of weight", "weight"),
    ],
)
def test_an_event_has_the_role_of_its_label(label: str, role: str) -> None:
    frame = event_frame(4, "fc", label, "Linear", Note("spike", "words"))
    assert (frame.batch, frame.name, frame.class_name, frame.phase) == (4, "fc", "Linear", "step")
    (row,) = frame.records
    assert (row.role, row.label, row.abs_max, row.isfinite) == (role, label, None, None)
