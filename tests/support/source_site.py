"""A statement of a function in a file, as the search for changes of the source sees it."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from nanwatch.diagnosis.patching.code_swap import find_target
from nanwatch.diagnosis.patching.site import Site
from nanwatch.diagnosis.patching.source import Target

# The functions of a target are found among all objects: the latest must live on.
_held: dict[str, Any] = {}


def site_of(body: str, folder: Path, **names: Any) -> Site:
    """The last line of a function `f(x, y, z)` with this body, in a module that knows torch, F, nn and math."""
    path = folder / f"program_{len(_held)}.py"
    path.write_text(f"def f(x, y, z):\n{body}\n")
    space = {"torch": torch, "F": F, "nn": nn, "math": math, **names}
    exec(compile(path.read_text(), str(path), "exec"), space)
    _held[str(path)] = space
    line = body.count("\n") + 2
    target = find_target(str(path), line)
    assert isinstance(target, Target), target
    return Site(target, line)


def returned(body: str, folder: Path, **names: Any) -> tuple[Site, ast.expr]:
    """The site of a function that ends with this body, and the expression that it returns."""
    *before, last = body.splitlines()
    site = site_of("\n".join(f"    {line}" for line in [*before, f"return {last}"]), folder, **names)
    assert site.value is not None
    return site, site.value
