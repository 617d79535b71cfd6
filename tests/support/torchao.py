"""torchao, which `make test-torchao` puts into a folder that is not on the path."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType


class TorchaoFinder(MetaPathFinder):
    """Finder of torchao alone: the torchvision beside it would keep transformers from being imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        folder = str(Path(sys.prefix, "engines"))
        return PathFinder.find_spec(fullname, [folder]) if fullname == "torchao" else None
