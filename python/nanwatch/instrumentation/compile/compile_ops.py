"""The operators that a watched model leaves in a compiled graph: `begin_`, `record_`, `look_`.

Each takes numbers and tensors alone, since a graph holds no Python objects. `_live` leads from the number of a watch
to its recorder.
"""

from __future__ import annotations

from ...numerics._ops import define
from . import _live


def _fake_nothing(*_: object) -> None:
    """Do nothing: the operators count calls in `sequence`, and no code reads that count."""


# No argument is called `node` or `self`: Inductor hands an operator's arguments on by name, among names of its own.
begin_ = define(
    "begin_(Tensor(a!) sequence, int watch, int callee, Tensor[] tensors) -> ()", _live.begin, _fake_nothing
)

record_ = define(
    "record_(Tensor(a!) sequence, int watch, int callee, int caller, str plan, Tensor[] tensors) -> ()",
    _live.record,
    _fake_nothing,
)

look_ = define("look_(Tensor(a!) sequence, int watch) -> ()", _live.look, _fake_nothing)
