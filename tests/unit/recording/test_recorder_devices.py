"""Rows that a device makes, over a stand-in that runs when told: the reports of the host, with one wait a batch."""

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from nanwatch.numerics import _extension
from support.gradient_models import Net, Spoiling, backward_frames, loss_of
from support.random_trees import run, tree
from support.stand_in_device import BROKEN, OLD_DRIVER, StandIn, stand_in
from support.toys import Does, Scale, mlp, names, text_of
from support.watching import watch

pytestmark = pytest.mark.skipif(_extension.C is None, reason="the Python recorder waits for each row")
INF = float("inf")
X = torch.ones(2, 3)


def device_or_host(on_device: bool) -> AbstractContextManager[StandIn]:
    """The stand-in, with all tensors on it or none."""
    return stand_in(place=lambda x: 0 if on_device else -1)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**32),
    poison=st.sampled_from([0.0, 0.02, 0.3]),
    check=st.sampled_from(["module", "batch"]),
    holds=st.booleans(),
)
def test_reports_are_those_of_the_host(seed: int, poison: float, check: Any, holds: bool) -> None:
    """Random trees with random faults: every frame and the report, whenever the rows come, and no stale hit.

    At the end of a batch nobody knows what the calls inside were given. A fault that the model was given beside
    another one that it made is the first on the host alone.
    """
    model = tree(seed, poison)
    with watch(model, max_frames=1000, on_nonfinite="record", act_at=check) as w:
        run(model, seed)
    frames, report, finding = repr(w.frames), text_of(w), w.report().finding
    with stand_in(holds=holds):
        with watch(model, max_frames=1000, on_nonfinite="record", act_at=check) as w:
            run(model, seed)
        assert repr(w.frames) == frames
        if finding is None or finding.origin in ("produced", "weight", "buffer"):
            assert text_of(w) == report


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_masks_and_infinities_that_are_meant(dtype: torch.dtype) -> None:
    """An additive mask of either kind is noted as on the host. A row without a zero is left to softmax to show."""
    lowest = torch.finfo(dtype).min
    causal = torch.ones(4, 4, dtype=torch.bool).triu(1)
    masks = [torch.zeros(4, 4).masked_fill(causal, low).to(dtype) for low in (-INF, lowest)]
    spoilt = masks[0].clone()
    spoilt[2] = -INF

    for given_masks, allowed in ((masks, ()), ([spoilt], "inf:0")):
        texts = []
        for on_device in (False, True):
            model = nn.ModuleList([Does(lambda x, *masks: x * 2)])
            with device_or_host(on_device):
                with watch(model, on_nonfinite="record", allow=allowed) as w:
                    model[0](torch.ones(2, dtype=dtype), *given_masks)
                texts.append(text_of(w))
        assert texts[1].count("Note(kind='mask'") == len(given_masks)
        assert texts[0] == texts[1] or allowed


def test_a_model_over_several_devices_and_streams_and_the_host() -> None:
    """One launch a frame and device, and a wait for each stream that was used; all frames keep their places."""
    where = {torch.float32: 0, torch.float64: 1, torch.float16: -1}
    with stand_in(place=lambda x: where[x.dtype]) as device:

        def moves(a: nn.Module, b: nn.Module, c: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
            device.stream = 2
            x = a(x)
            device.stream = 1
            y = b(x.half())
            return x, y, c(y.double())

        model = Does(moves, Scale(2.0), Scale(), Scale())
        with watch(model, act_at="batch") as w:
            model(torch.ones(3))
            assert (device.launches, device.waits) == ([2, 2, 1, 1], 3)
    assert names(w) == [(0, "parts.0"), (0, "parts.1"), (0, "parts.2"), (0, "")]
    assert [r.abs_max for r in w.frames[-1].records] == [1, 2, 2, 2]


def test_an_error_of_the_device_leaves_the_frames_up_to_it() -> None:
    """Rows that the device wrote before it failed are reported; rows that it did not write are not called finite."""

    def asserts(x: Tensor) -> Tensor:
        device.run(7)  # the rows of the two layers at the front
        device.broken = True
        raise RuntimeError("CUDA error: device-side assert triggered")

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), Scale(), Does(asserts))
    with stand_in() as device:
        w = watch(model)
        with pytest.raises(RuntimeError, match="device-side assert"):
            model(torch.ones(1, 3))
        w.stop()
        assert names(w) == [(0, "0"), (0, "1"), (0, "2")]
        assert all(r.isfinite for f in w.frames[:2] for r in f.records)
        notes = [str(r.note) for r in w.frames[2].records]
        assert notes[-1].startswith("not checked: ")
        assert f"error {BROKEN} of the stand-in" in notes[-1]


@pytest.mark.parametrize("error", [BROKEN, OLD_DRIVER])
def test_a_launch_that_fails_leaves_its_call_to_the_host(error: int) -> None:
    """The device is asked again for the next call, but not where the error says that no kernel can run there."""
    model = mlp()
    with watch(model) as w:
        model(X)
    expected = text_of(w)
    with stand_in() as device, watch(model) as w:
        device.fail_next = error
        model(X)
    assert text_of(w) == expected
    assert len(device.launches) == (0 if error == OLD_DRIVER else 3)


def test_a_capture_is_left_alone() -> None:
    """It has no launch and no wait of the watch in it, and the calls after it are read as before."""
    model = mlp()
    with stand_in() as device, watch(model):
        model(X)
        launches, waits = len(device.launches), device.waits
        device.capturing = True
        model(X)
        device.capturing = False
        assert (len(device.launches), device.waits) == (launches, waits)
        model(X)
        assert len(device.launches) > launches


@settings(max_examples=15)
@given(seed=st.integers(0, 2**32), spoils=st.booleans(), behind=st.booleans(), skips=st.sampled_from([0, 20]))
def test_reports_of_backwards_are_those_of_the_host(seed, spoils, behind, skips):
    """Random graphs over three batches, one of which may be spoilt: every frame in its order, and the report."""
    found = {}
    for check, place, holds in (("module", -1, True), ("batch", 0, True), ("batch", 0, False)):
        model = Net(seed)
        if spoils:
            model.steps[0] = Spoiling(model.steps[0], behind)
        torch.manual_seed(0)
        with stand_in(place=lambda x, place=place: place, holds=holds):
            options: Any = {"gradients": True, "act_at": check, "max_skipped_steps": skips}
            with watch(model, max_frames=1000, on_nonfinite="record", **options) as w:
                for _ in range(3):
                    loss_of(model(torch.randn(2, 4, requires_grad=True))).backward()
            found[check, place, holds] = text_of(w)
    assert len(set(found.values())) == 1


def test_a_forward_and_a_backward_wait_once_each() -> None:
    """A call launches once for what it has that is new, a gradient when it comes; the host waits when all is over."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with stand_in() as device, watch(model, gradients=True) as w:
        for count in (0, 2):
            loss = model(X).sum()
            # Weights, an input and an output; an output; the same again; the root reads its output in any case.
            assert device.launches[-4:] == [4, 1, 3, 1]
            assert device.waits == count + 1
            loss.backward()
            assert device.launches[-7:] == [1] * 7  # of three outputs and four weights
            assert device.waits == count + 2
            optimizer.step()
            assert device.waits == count + 2
        assert [frame.name for frame in backward_frames(w)][-4:] == ["2", "1", "0", ""]
