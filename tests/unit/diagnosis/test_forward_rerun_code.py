"""Re-runs of models with code that does unusual things: transforms, modes, compilers, tensors of other kinds."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import nanwatch
from support.examined import Does, culprit, exponential, look
from support.spy import Spy

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_submodule(reentrant: bool) -> None:
    """Inside of activation checkpointing as outside of it."""
    model = Does(lambda part, x: checkpoint(part, x, use_reentrant=reentrant), Does(exponential))
    finding, seen = look(model, torch.ones(2, requires_grad=True))
    assert (finding.module, seen.operation, seen.source) == (
        "parts.0",
        "aten.exp.default",
        culprit(exponential),
    )


def test_the_fast_path_of_transformer_layers() -> None:
    """Without a graph PyTorch's encoder layer takes a path that calls none of its parts; the re-run does not."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    nn.init.constant_(layer.norm1.weight, 1e20)
    nn.init.normal_(layer.linear1.weight, std=1e20)
    finding, seen = look(nn.Sequential(layer), torch.randn(1, 3, 8))
    assert (finding.module, seen.transient) == ("0.linear1", False)
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.parametrize("owner", [torch, nanwatch])
def test_a_package_whose_name_begins_alike(owner: ModuleType) -> None:
    """torchvision is not torch: its lines are the program's."""
    filename = f"{Path(str(owner.__file__)).parent}vision/models.py"
    names: dict[str, Any] = {}
    exec(compile("def forward(x):\n    return x * 1e30 * 1e30\n", filename, "exec"), names)
    _, seen = look(Does(names["forward"]), torch.ones(2))
    assert seen.source == f"{filename}:2"


def test_vmap_inside() -> None:
    """Inside torch.func the operations are seen on the whole batch."""
    model = Does(lambda x: torch.func.vmap(exponential)(x).sum())
    _, seen = look(model, torch.ones(3, 2))
    assert (seen.operation, seen.source) == ("aten.exp.default", culprit(exponential))


def test_modes_of_the_user() -> None:
    """Dispatch and function modes of the user's, around the module and in it, are left to do their work."""
    counted = Spy()

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counted.add(str(func))
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def forward(x: Tensor) -> Tensor:
        with Function(), Dispatch():
            return exponential(x)

    with Function(), Dispatch():
        _, seen = look(Does(forward), torch.ones(2))
    assert (seen.operation, seen.source) == ("aten.exp.default", culprit(exponential))
    # Both modes, both runs; of our looking they see nothing but the random state.
    assert counted.values.count("aten.exp.default") == 4
    assert not any("isfinite" in one or "isnan" in one for one in counted.values)


def test_tensors_without_strides() -> None:
    """Sparse, nested and subclass tensors pass, and a bad value that went through a sparse one is followed."""

    def forward(x: Tensor) -> Tensor:
        bad = x.to_sparse() / 0  # culprit
        return (bad * 2).to_dense()

    _, seen = look(Does(forward), torch.ones(2))
    assert seen.source == culprit(forward)


def test_a_distributed_tensor(one_process_mesh: object) -> None:
    """The operations on a DTensor are followed, by its local shard."""
    from torch.distributed.tensor import distribute_tensor

    def forward(x: Tensor) -> Tensor:
        shared = distribute_tensor(x, one_process_mesh) * 1e38  # type: ignore[arg-type]
        large = shared * 1e3  # culprit
        return (large - large).to_local()

    _, seen = look(Does(forward), torch.ones(2))
    assert (seen.operation, seen.source) == ("aten.mul.Tensor", culprit(forward))


def test_narrow_formats() -> None:
    """A cast to float8 that does not hold the value; the bad values are followed through the cast back."""

    def forward(x: Tensor) -> Tensor:
        narrow = (x * 1000).to(torch.float8_e4m3fnuz)  # culprit
        return narrow.float() - 1

    _, seen = look(Does(forward), torch.tensor([0.1, 1.0]))
    assert (seen.operation, seen.source) == ("aten._to_copy.default", culprit(forward))
    assert seen.extent == "one element"


def test_complex_numbers() -> None:
    """Complex tensors, and the real ones that they are seen as."""

    def forward(x: Tensor) -> Tensor:
        large = torch.complex(x, x) * 1e38
        square = large * large  # culprit
        return torch.view_as_real(square).sum(-1)

    _, seen = look(Does(forward), torch.ones(3))
    assert (seen.operation, seen.source) == ("aten.mul.Tensor", culprit(forward))


def test_an_operator_of_the_user() -> None:
    """A custom operator is one operation, named in full."""

    @torch.library.custom_op("nanwatch_test::overflow", mutates_args=())
    def overflow(x: Tensor) -> Tensor:
        return x * 1e38 * 1e3

    def forward(x: Tensor) -> Tensor:
        return overflow(x) * 2  # culprit

    _, seen = look(Does(forward), torch.ones(3))
    assert (seen.operation, seen.source) == ("nanwatch_test.overflow.default", culprit(forward))


def test_a_value_that_no_operation_made() -> None:
    """Numpy wrote it: there is no operation, and that is said; where it is, is said too."""

    def forward(x: Tensor) -> Tensor:
        y = x + 1
        y.numpy()[1] = NAN
        return y

    _, seen = look(Does(forward), torch.ones(3))
    assert (seen.operation, seen.extent, seen.index) == (None, "one element", (1,))
    assert any("no operation" in one for one in seen.remarks)


def test_fake_and_meta_tensors_pass() -> None:
    """Tensors without values are no trouble."""

    def forward(x: Tensor) -> Tensor:
        with FakeTensorMode():
            torch.ones(2).mul_(2) / 0
        torch.ones(2, device="meta").exp_()
        return x / 0  # culprit

    _, seen = look(Does(forward), torch.ones(2))
    assert (seen.operation, seen.source) == ("aten.div.Tensor", culprit(forward))


def test_a_scripted_module() -> None:
    """TorchScript's operations are seen; its interpreter has no Python line."""
    scripted = torch.jit.script(Log())
    _, seen = look(nn.Sequential(scripted), torch.zeros(2))
    assert seen.operation == "aten.log.default"


class Log(nn.Module):
    """A logarithm; at module level, where TorchScript finds its source."""

    def forward(self, x: Tensor) -> Tensor:
        return x.log()
