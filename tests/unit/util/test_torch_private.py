"""The list of private names of PyTorch: all of them exist, the package uses each, and no other."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

import nanwatch
from nanwatch.util import torch_private
from nanwatch.util.torch_private import SEEN

pytestmark = pytest.mark.skipif(
    [*map(int, torch.__version__.split(".")[:2])] < [*map(int, torch_private.LATEST.split("."))],
    reason="an older torch lacks names of the latest version in the list, and the code asks which are there",
)

PACKAGE = Path(nanwatch.__file__).parent
LISTED = {name for names in SEEN.values() for name in names}
FILES = [path for path in PACKAGE.rglob("*.py") if path != Path(torch_private.__file__)]
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in FILES}
# What nanwatch holds without naming its class.
HELD = (
    torch.Tensor,
    torch.UntypedStorage,
    torch._C._FunctionBase,
    torch._ops.OpOverload,
    torch.amp.GradScaler,
    FSDPModule,
)


def is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def dotted(node: ast.expr) -> str:
    """`a.b.c` as it is written; "" for an attribute of anything else."""
    if isinstance(node, ast.Name):
        return node.id
    before = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return before and f"{before}.{node.attr}"


def up_to_a_value(name: str) -> str:
    """The name without the attributes of what is no module and no class; "" for a module."""
    found: Any = torch
    parts = name.split(".")
    for i, part in enumerate(parts[1:], 2):
        place = ".".join(parts[:i])
        found = getattr(found, part) if hasattr(found, part) else import_module(place)
        if not inspect.ismodule(found) and not inspect.isclass(found):
            return place
    return "" if inspect.ismodule(found) else name


def by_path(tree: ast.Module) -> Iterator[str]:
    """Yield the private names that lead from `torch`, by whatever names the file imports them."""
    known = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [
                (one.asname or "torch", one.name if one.asname else "torch")
                for one in node.names
                if one.name.split(".")[0] == "torch"
            ]
        elif (
            isinstance(node, ast.ImportFrom)
            and (node.module or "").split(".")[0] == "torch"
            and not node.level
        ):
            names = [(one.asname or one.name, f"{node.module}.{one.name}") for one in node.names]
        else:
            continue
        known.update(names)
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.Name) and id(node) not in inner:
            root, _, rest = dotted(node).partition(".")
            name = f"{known.get(root, '')}.{rest}".strip(".")
            if root in known and is_private(name) and (name := up_to_a_value(name)) and is_private(name):
                yield name


def by_object(tree: ast.Module) -> set[str]:
    """The attributes that a file takes from objects whose classes are not its own."""
    nodes = list(ast.walk(tree))
    attributes = [node for node in nodes if isinstance(node, ast.Attribute)]
    asked = [
        node.args[1].value
        for node in nodes
        if isinstance(node, ast.Call) and dotted(node.func) in ("getattr", "hasattr")
        if isinstance(node.args[1], ast.Constant)
    ]
    own = {node.attr for node in attributes if dotted(node.value) in ("self", "cls")}
    own |= {one.name for one in nodes if isinstance(one, ast.FunctionDef)}
    return {node.attr for node in attributes if node.attr not in own}.union(asked)


def test_the_installed_torch_has_all_of_them() -> None:
    """A name that is gone is in this list, with all others that are, and `grep` finds its places."""
    assert not torch_private.missing(), f"torch {torch.__version__} lacks these; see {torch_private.__file__}"


def test_a_name_that_is_gone_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a module, a class or an attribute that its objects have."""
    gone = (
        "torch._nothing.at_all",
        "torch.Tensor._nothing",
        "torch.amp.GradScaler._nothing",
        "torch._C._nothing",
    )
    monkeypatch.setitem(
        SEEN, torch_private.LATEST, ("torch.Tensor._base", "torch.amp.GradScaler._scale", *gone)
    )
    assert torch_private.missing() == list(gone)


def test_all_that_the_package_uses_are_listed() -> None:
    """By path in whatever import, or as an attribute of an object of PyTorch's."""
    used = {name: path for path, tree in TREES.items() for name in by_path(tree)}
    known = {".".join(name.split(".")[:i]) for name in LISTED for i in range(name.count(".") + 2)}
    assert not {name: path for name, path in used.items() if name not in known}
    makers = [kind.__init__.__code__.co_names for kind in HELD if hasattr(kind.__init__, "__code__")]
    held = {name for names in (*map(dir, HELD), *makers) for name in names if is_private(name)}
    last = {name.rpartition(".")[2] for name in LISTED}
    assert not {name: path for path, tree in TREES.items() for name in held & {*by_object(tree)} - last}


def test_each_of_them_is_used() -> None:
    """The list grows no older than the code."""
    words = " ".join(path.read_text(encoding="utf-8") for path in FILES)
    assert not {name for name in LISTED if name.rpartition(".")[2] not in words}
