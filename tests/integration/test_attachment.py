"""A watch leaves nothing in its modules, their copies, pickles, scripts and exports, and asks modules for nothing."""

from __future__ import annotations

import copy
import io
import pickle
import re
import zipfile
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nanwatch import watch
from nanwatch.instrumentation import slot
from support.toys import mlp, names

pytestmark = pytest.mark.usefixtures("each_recorder")


class CopiesItsDict(nn.Module):
    """Its state is its `__dict__`, as that of nn.RNNBase."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class ReducesToItsDict(CopiesItsDict):
    """Its pickle holds `vars(self)` itself."""

    def __reduce__(self) -> Any:
        return copy.copy, (None,), vars(self)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(3, 4),
    "GRU in a model": lambda: nn.Sequential(nn.Linear(3, 4), nn.GRU(4, 2)),
    "attention": lambda: nn.TransformerEncoderLayer(4, 2),
    "copies its __dict__": CopiesItsDict,
    "reduces to its __dict__": ReducesToItsDict,
}


def saved(model: nn.Module) -> bytes:
    """The pickle in a file of torch.save; the other entries are the weights."""
    file = io.BytesIO()
    torch.save(model, file)
    with zipfile.ZipFile(file) as archive:
        return archive.read(next(name for name in archive.namelist() if name.endswith("data.pkl")))


def all_vars(model: nn.Module) -> list[dict[str, Any]]:
    return [vars(module).copy() for module in model.modules()]


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
def test_pickles_and_copies_are_those_of_the_unwatched_model(make: Callable[[], nn.Module]) -> None:
    """`torch.save`, `pickle`, `vars` and `state_dict` have the bytes and keys they have without a watch."""
    torch.manual_seed(0)
    model = make()
    expected, pickled, variables = saved(model), pickle.dumps(model), all_vars(model)
    keys = list(model.state_dict())
    with watch(model), watch(model, gradients=True):
        assert saved(model) == expected
        assert pickle.dumps(model) == pickled
        assert [state.keys() for state in all_vars(model)] == [state.keys() for state in variables]
        assert list(model.state_dict()) == keys
        if not isinstance(model, ReducesToItsDict):
            for copied in (copy.copy(model), copy.deepcopy(model)):
                assert not slot.wrappers(copied)
                assert [state.keys() for state in all_vars(copied)] == [state.keys() for state in variables]
    assert saved(model) == expected


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.rnn = nn.Linear(2, 2), nn.GRU(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x))


READERS: dict[str, Callable[[nn.Module, Tensor], str]] = {
    "script": lambda model, _: str(torch.jit.script(model).inlined_graph),
    # Without the number that TorchScript gives each class of this name.
    "trace": lambda model, x: re.sub(r"___torch_\w+\.", "", str(torch.jit.trace(model, (x,)).inlined_graph)),
    "export": lambda model, x: str(torch.export.export(model, (x,)).graph),
    "strict export": lambda model, x: str(torch.export.export(model, (x,), strict=True).graph),
    "fx": lambda model, _: str(torch.fx.symbolic_trace(model).graph),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize("read", READERS.values(), ids=READERS.keys())
def test_scripts_and_exports_are_those_of_the_unwatched_model(
    read: Callable[[nn.Module, Tensor], str],
) -> None:
    """The graph of a watched model is that of the model, and the watch goes on afterwards."""
    model, x = Net(), torch.ones(1, 2)
    expected = read(model, x)
    with watch(model) as w:
        assert read(model, x) == expected
        model(x)
        assert names(w)[-2:] == [(w.batch, "linear"), (w.batch, "")]


def test_compile_and_its_end_behind_a_watch() -> None:
    """`module.compile()` and its removal go where they go without a watch, and the watch calls what is there."""
    model = mlp()
    calls: list[Any] = []

    def compiled(*args: Any) -> Any:
        calls.append(args)
        return model._call_impl(*args)

    with watch(model) as w:
        model._compiled_call_impl = compiled
        assert vars(model)["_compiled_call_impl"] is compiled
        model(torch.ones(1, 3))
        del model._compiled_call_impl
        model(torch.ones(1, 3))
        with pytest.raises(AttributeError):
            del model._compiled_call_impl
    assert len(calls) == 1
    assert w.batch == 1
    assert model._compiled_call_impl is None


def test_a_module_made_in_each_forward_takes_the_place_of_the_one_before() -> None:
    """A recorder grows by nothing for it, and each has its frame, also where an infinity is meant for some."""

    class Makes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.act = nn.Softmax(dim=0)
            return self.act(x)

    model = Makes()
    with watch(model, max_frames=200) as w:
        for _ in range(50):
            model(torch.tensor([1.0, float("-inf")]))
        num_nodes = w._recorder.add_node("next", model, False, False)
    assert names(w) == [(batch, name) for batch in range(50) for name in ("act", "")]
    assert num_nodes <= 3
