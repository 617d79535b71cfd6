"""Diagnosis of a finding: what a re-run of its batch shows, and where in a tensor its bad elements are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from ..instrumentation.execution_context import Autocast, RngState
from ..numerics import _reference
from ..numerics.readable import local_shard, only_our_dispatch, unreadable
from ..records.record import Frame, Record
from ..report.finding import Finding, Value, finding_of
from ..report.histogram import StoredHistogram
from ..util.place import Place

# `(size, indices)` of each dimension.
BadRows: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A module call as it was handed in: `module(*args, **kwargs)`, in the model by the name of `name`.

    `rng`, `autocast` and the `versions` of its tensors, with their labels, are as the call found them, or None and
    empty where nobody looked.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    rng: RngState | None = None
    autocast: tuple[Autocast, ...] = ()
    versions: tuple[tuple[str, Tensor, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Expression:
    """The source of an operation: file, line, and the expression, as `code.co_positions()` has it, where it is known.

    `counts` are the positions of the operands that hold whole numbers only, not all of them zero, and `numbers` those
    that are Python numbers, with their values.
    """

    filename: str
    line: int
    positions: tuple[int | None, int | None, int | None, int | None] | None = None
    counts: frozenset[int] = frozenset()
    numbers: tuple[tuple[int, float], ...] = ()

    @property
    def at(self) -> Place:
        """The place for a report, with columns where the expression lies in one line."""
        line, last, start, end = self.positions or (None, None, None, None)
        is_known = line == last == self.line and start is not None and end is not None
        return Place(self.filename, self.line, (start, end) if is_known else None)  # type: ignore[arg-type]

    def __str__(self) -> str:
        return str(self.at)


class BackwardStart(NamedTuple):
    """The gradients, by label, that the outputs of call `number` of module `name` had in the failed backward."""

    name: str
    number: int
    gradients: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Facts about a finding that a re-run of its batch showed.

    `operation` (as "aten.exp.default"), `place` (the innermost line that is not PyTorch's) and `operands` (records of
    its tensors, before it ran) are of the operation that made the non-finite value; `made` is the value as the
    operation made it. They are None and empty when no operation was seen. `transient` is True when the re-run did
    not make the value again, False when it did, None when that says nothing. `extent` and `index` are of the non-finite
    tensor. `call` is the call in which the value was made; it holds the call's tensors, so drop it when done. `remarks`
    are sentences, `spreads` of the operands, as far as they were there, and of the
    non-finite tensor. `rows` are the bad rows of the non-finite tensor and of what the operation made. `start` is where
    a failed backward began. `made_in` is the module whose own code made the operation, where that is another than the
    finding's and not inside it. `holder` is a frame with the weight or buffer that the operation was given non-finite.
    `is_unseen`: no output of a module and no gradient of one shows the value.
    """

    operation: str | None = None
    place: Expression | None = None
    operands: tuple[Record, ...] = ()
    transient: bool | None = None
    extent: str = ""
    index: tuple[int, ...] | None = None
    remarks: tuple[str, ...] = ()
    call: ModuleCall | None = None
    spreads: tuple[StoredHistogram, ...] = ()
    made: Value | None = None
    rows: tuple[BadRows, ...] = ()
    start: BackwardStart | None = None
    made_in: str | None = None
    holder: Frame | None = None
    is_unseen: bool = False

    @property
    def source(self) -> str | None:
        """The place as "/path/file.py:123"."""
        return None if self.place is None else str(self.place)


def enrich(finding: Finding, diagnosis: Diagnosis) -> Finding:
    """Return the finding with the facts of the diagnosis, and those of its own that the diagnosis has not."""
    holder = diagnosis.holder
    if holder is not None and (record := holder.fault) is not None:
        held = finding_of(
            holder, record, "weight" if record.role == "weight" else "buffer", None, finding.rank
        )
        finding = replace(held, sequence=finding.sequence, remarks=finding.remarks)
    made_in = diagnosis.made_in
    if made_in == finding.module:  # which wrote it into what it was given
        finding = replace(finding, origin="produced", source_module=None)
    elif made_in is not None:
        finding = replace(finding, origin="received", source_module=made_in)
    return replace(
        finding,
        operation=diagnosis.operation or finding.operation,
        place=finding.place if diagnosis.place is None else diagnosis.place.at,
        operands=diagnosis.operands or finding.operands,
        transient=diagnosis.transient,
        extent=diagnosis.extent,
        spreads=diagnosis.spreads,
        index=diagnosis.index if finding.index is None else finding.index,
        made=diagnosis.made,
        remarks=(*finding.remarks, *diagnosis.remarks),
    )


# Beyond this a bool for every element, of which there are three at the worst, asks too much of a device that is full.
MAX_ELEMENTS = 1 << 31
# isfinite makes temporaries of the size of what it is given: 4 Mi elements at a time keep them below 64 MiB.
_CHUNK = 1 << 22


def describe(x: Tensor, *, max_elements: int = MAX_ELEMENTS) -> str:
    """Return where the nan and inf of `x` are, as one of the phrases below, or "" when it cannot be told.

    The words are exact. Where none fit, they say "scattered".

    ====================================================  ==========================================================
    "none", "all", "one element"
    "1 of 4096 rows, row 7", "1 of 64 rows, [3, 12, :]"   a row is all positions of the last dimension
    "rows 2 to 5", "the last column", "3 of 8 columns"    of a matrix
    "index 17 of dimension 1, everywhere"                 likewise, of a tensor that is no matrix; "index 3" of a vector
    "the block [3, :, 4:7]"                               all that x[3, :, 4:7] selects
    "7 of 4096 rows"                                      whole rows
    "above the diagonal"                                  of the last two dimensions, everywhere
    "scattered over 5 of 4096 rows"                       parts of 5 rows
    "scattered in the block [:, 3:8]"                     parts of it, nothing outside
    "scattered"
    ====================================================  ==========================================================

    Reads any dtype and strides; of a DTensor the local shard. Takes up to three bytes an element for a while. Returns
    "" for tensors of more than `max_elements` elements, without values, and of other layouts than strided.
    """
    with only_our_dispatch(), torch.no_grad():
        plain = _plain(x)
        if plain is None or plain.numel() > max_elements:
            return ""
        nonfinite = torch.empty(plain.shape, dtype=torch.bool, device=plain.device)
        _mark(plain.detach(), nonfinite)
        return _words(nonfinite)


def bad_rows(x: Tensor) -> BadRows:
    """Return for each dimension its size and the indices that hold a nan or an inf, () where all do."""
    with only_our_dispatch(), torch.no_grad():
        plain = _plain(x)
        if plain is None or not 0 < plain.numel() <= MAX_ELEMENTS:
            return ()
        nonfinite = torch.empty(plain.shape, dtype=torch.bool, device=plain.device)
        _mark(plain.detach(), nonfinite)
        found = ((size, tuple(_nonfinite_indices(nonfinite, dim))) for dim, size in enumerate(plain.shape))
        return tuple((size, rows if len(rows) < size else ()) for size, rows in found)


def _plain(x: Tensor) -> Tensor | None:
    if unreadable(x):
        return None
    local = local_shard(x)
    x = x if local is None else local
    if x.layout is not torch.strided or x.is_nested or x.is_quantized:
        return None
    return x


def _mark(x: Tensor, nonfinite: Tensor) -> None:
    """Set `nonfinite` where `x` is not finite."""
    if x.numel() <= _CHUNK:
        nonfinite.copy_(~torch.isfinite(_reference._to_arithmetic(x)))
        return
    longest = max(range(x.ndim), key=lambda dim: x.shape[dim])
    half = x.shape[longest] // 2
    for start, length in ((0, half), (half, x.shape[longest] - half)):
        _mark(x.narrow(longest, start, length), nonfinite.narrow(longest, start, length))


def _words(nonfinite: Tensor) -> str:
    count = int(nonfinite.sum())
    if count == 0:
        return "none"
    if count == nonfinite.numel():
        return "all"
    if count == 1:
        return "one element"
    indices = [_nonfinite_indices(nonfinite, dim) for dim in range(nonfinite.ndim)]
    words = _crossing(nonfinite.shape, indices) if prod(map(len, indices)) == count else ""
    return words or _whole_rows(nonfinite) or _above_diagonal(nonfinite) or _scattered(nonfinite, indices)


def _nonfinite_indices(nonfinite: Tensor, dim: int) -> list[int]:
    others = [other for other in range(nonfinite.ndim) if other != dim]
    hit = nonfinite.any(dim=others) if others else nonfinite
    found: list[int] = hit.nonzero().flatten().tolist()
    return found


def _crossing(shape: torch.Size, indices: list[list[int]]) -> str:
    """Return the words for all elements whose index is, in every dimension, one of those given; "" without any."""
    restricted = [dim for dim, one in enumerate(indices) if len(one) < shape[dim]]
    *leading, last = indices
    if leading and len(last) == shape[-1] and all(len(one) == 1 for one in leading):
        return f"1 of {prod(shape[:-1])} rows, {_row(shape, indices)}"
    if len(restricted) == 1:
        (dim,) = restricted
        kind = ("row", "column")[dim] if len(shape) == 2 else "index"
        words = _of_one_dimension(indices[dim], shape[dim], kind)
        return words if kind != "index" or len(shape) == 1 else f"{words} of dimension {dim}, everywhere"
    if any(one[-1] - one[0] >= len(one) for one in indices):
        return ""
    return f"the block {_block(indices, shape)}"


def _row(shape: torch.Size, indices: list[list[int]]) -> str:
    if len(shape) > 2:
        return f"[{', '.join(str(one[0]) for one in indices[:-1])}, :]"
    return "the last" if indices[0][0] == shape[0] - 1 else f"row {indices[0][0]}"


def _of_one_dimension(indices: list[int], size: int, kind: str) -> str:
    many = "indices" if kind == "index" else f"{kind}s"
    if len(indices) == 1:
        return f"the last {kind}" if indices[0] == size - 1 and kind != "index" else f"{kind} {indices[0]}"
    if indices[-1] - indices[0] == len(indices) - 1:
        return f"{many} {indices[0]} to {indices[-1]}"
    return f"{len(indices)} of {size} {many}"


def _block(indices: list[list[int]], shape: torch.Size) -> str:
    """Return the smallest index in brackets that selects all of these: `[3, :, 4:7]`."""
    spelt = []
    for one, size in zip(indices, shape, strict=True):
        start, stop = one[0], one[-1] + 1
        if stop - start == 1 < size:
            spelt.append(str(start))
        else:
            spelt.append(f"{start or ''}:{stop if stop < size else ''}")
    return f"[{', '.join(spelt)}]"


def _whole_rows(nonfinite: Tensor) -> str:
    hit = nonfinite.any(dim=-1)
    if nonfinite.ndim < 2 or not torch.equal(hit, nonfinite.all(dim=-1)):
        return ""
    return f"{int(hit.sum())} of {hit.numel()} rows"


def _above_diagonal(nonfinite: Tensor) -> str:
    if nonfinite.ndim < 2:
        return ""
    ones = torch.ones(nonfinite.shape[-2:], dtype=torch.bool, device=nonfinite.device)
    return "above the diagonal" if bool((nonfinite == ones.triu(1)).all()) else ""


def _scattered(nonfinite: Tensor, indices: list[list[int]]) -> str:
    # A block that is most of the tensor tells nothing.
    if 2 * prod(one[-1] - one[0] + 1 for one in indices) <= nonfinite.numel():
        return f"scattered in the block {_block(indices, nonfinite.shape)}"
    if nonfinite.ndim > 1:
        rows = nonfinite.any(dim=-1)
        hit = int(rows.sum())
        if hit < rows.numel():
            return f"scattered over {hit} of {rows.numel()} rows"
    return "scattered"
