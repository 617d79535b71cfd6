"""The folders of csrc/: includes point down only, and the kernels do not know PyTorch. Nothing is compiled."""

from __future__ import annotations

import re

from support.paths import ROOT

CSRC = ROOT / "csrc"
# From the bottom to the top. A folder includes itself and those below it. The recorder of calls and that of gradients
# are one layer: each holds the other.
LAYERS = ["numerics"], ["cpu", "cuda", "blackbox"], ["ops"], ["device"], ["recorder", "gradients"], [""]
RANKS = {folder: rank for rank, folders in enumerate(LAYERS) for folder in folders}
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<([^>]+)>)', re.MULTILINE)
FILES = sorted(
    str(path.relative_to(CSRC)) for suffix in ("h", "cpp", "cu") for path in CSRC.rglob(f"*.{suffix}")
)


def includes(file: str) -> tuple[list[str], list[str]]:
    """Return the own files and the foreign headers that a file includes."""
    found = INCLUDE.findall((CSRC / file).read_text())
    return [own for own, _ in found if own], [foreign for _, foreign in found if foreign]


def folder_of(file: str) -> str:
    return file.rpartition("/")[0]


def may_include(file: str, other: str) -> bool:
    here, there = folder_of(file), folder_of(other)
    return here == there or RANKS[there] < RANKS[here] or {here, there} == {"recorder", "gradients"}


def test_includes_are_written_from_csrc_and_point_down():
    assert {folder_of(file) for file in FILES} == set(RANKS)
    edges = [(file, own) for file in FILES for own in includes(file)[0]]
    assert [edge for edge in edges if edge[1] not in FILES] == []
    assert [edge for edge in edges if not may_include(*edge)] == []


def test_the_kernels_include_neither_torch_nor_python():
    foreign = re.compile(r"(torch|ATen|c10|pybind11)/|Python\.h")
    files = [file for file in FILES if folder_of(file) in (*LAYERS[0], *LAYERS[1])]
    assert [(file, name) for file in files for name in includes(file)[1] if foreign.match(name)] == []
