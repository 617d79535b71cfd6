"""How much a forward and a training step read, derived from the tensors themselves and not from the machine."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch.numerics import _extension
from nanwatch.recording.walk import call_leaves, leaves
from support.architectures import built, inputs_of
from support.training import loss_of
from support.watching import watch

pytestmark = pytest.mark.skipif(_extension.C is None, reason="the Python recorder reads everything")


def passing(model: nn.Module, inputs: dict[str, Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the distinct tensors that go in and out of modules in one forward, and those that the model returns.

    Held until the end, so that no address comes twice. The same part of the same storage at the same version is the
    same tensor, whatever its shape.
    """
    by_place: dict[Any, Tensor] = {}
    returned: list[Tensor] = []

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        returned[:] = [x for _, x in leaves(output, "output") if isinstance(x, Tensor)]
        given = [x for _, x in call_leaves(args, kwargs) if isinstance(x, Tensor)]
        # Results of the model itself are read in any case, so they are returned apart.
        for x in given if module is model else given + returned:
            layout = () if x.is_contiguous() else (x.shape, x.stride())
            key = (x.untyped_storage()._cdata, x.storage_offset(), x.dtype, x.numel(), layout, x._version)
            by_place.setdefault(key, x)

    handles = [module.register_forward_hook(note, with_kwargs=True) for module in model.modules()]
    with torch.no_grad():
        model(**inputs)
    for handle in handles:
        handle.remove()
    weights = {x.untyped_storage()._cdata for x in [*model.parameters(), *model.buffers()]}
    return [x for x in by_place.values() if x.untyped_storage()._cdata not in weights], returned


@pytest.mark.parametrize("name", ["t5", "llama", "resnet"])
def test_a_second_forward_reads_each_activation_once_and_no_hit_is_stale(name: str) -> None:
    """No weight is read again: the tensors read are the distinct ones that pass between modules, and the outputs.

    Then five steps of training with a fused optimizer: every cache hit is read again and compared.
    """
    model, inputs = copy.deepcopy(built(name)).eval(), inputs_of(name, 0)
    with watch(model, verify_hits=True) as w:
        with torch.no_grad():
            model(**inputs)
            before = w.counters
            model(**inputs)
        gain = {key: count - before[key] for key, count in w.counters.items()}
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        for step in range(5):
            loss_of(model(**inputs_of(name, step))).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert w.counters["stale_hits"] == 0
    distinct, returned = passing(copy.deepcopy(built(name)).eval(), inputs)
    assert gain["tensors_read"] + gain["cache_hits"] == gain["tensors"]
    # Now and then two tensors share a place in the cache, by their addresses, and one is read once more.
    assert 0 <= gain["tensors_read"] - len(distinct) - len(returned) <= 10
    once_more = gain["bytes_read"] - sum(x.nbytes for x in (*distinct, *returned))
    assert 0 <= once_more <= 10 * max(x.nbytes for x in distinct)
