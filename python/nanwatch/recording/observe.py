"""Values that a frame of a call or of a step shows, and the record of one value."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from ..numerics import _extension, readable
from ..numerics.formats import AbsRange, TensorHealth
from ..numerics.ranges import abs_range, abs_ranges, health_of, range_and_fingerprint, sketch, tensor_health
from ..numerics.readable import (
    dequantized,
    inner_tensors,
    is_captured,
    is_plain,
    local_shard,
    only_our_dispatch,
    unreadable,
)
from ..records.record import CAPTURED, PLAIN_MASK, Note, Record, Role
from ..util.messages import spell, suppressed, suppressing
from ..util.program import each_parameter
from .events import Settings
from .masks import Excuses, excuse, is_mask, may_be_finite_mask
from .walk import Unwalked, call_leaves, leaves

_NOTHING, _STATE = Settings(), Settings(inputs=False, outputs=False)


def call_values(
    wanted: Settings, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any
) -> list[tuple[Role, str, Any]]:
    """Return what a frame of this call shows, objects in arguments apart: role, label and value of each record."""
    values: list[tuple[Role, str, Any]] = []
    if wanted.weights:
        values += [("weight", name, x) for name, x in own_tensors(module._parameters)]
    if wanted.buffers:
        values += [("buffer", name, x) for name, x in own_tensors(module._buffers) if holds_fractions(x)]
    if wanted.inputs:
        values += [("input", label, x) for label, x in call_leaves(args, kwargs, objects=False)]
    if wanted.outputs:
        given = (*args, *kwargs.values())
        values += [("output", label, x) for label, x in leaves(output, "output", True, given)]
    return values


def own_tensors(named: Mapping[str, Tensor | None]) -> list[tuple[str, Tensor]]:
    """Return the tensors of a module's `_parameters` or `_buffers`, each once, without the empty ones."""
    by_id: dict[int, tuple[str, Tensor]] = {}
    for name, x in named.items():
        if x is not None:
            by_id.setdefault(id(x), (name, x))
    return list(by_id.values())


# nn.MultiheadAttention holds it for its weights, and never calls it.
_HOLDS_WEIGHTS = "NonDynamicallyQuantizableLinear"


def may_be_called(module: nn.Module) -> bool:
    """Return whether the module is called for its forward, and does not only hold tensors."""
    kind = type(module)
    # A scripted class has no forward of its own.
    return kind.__name__ != _HOLDS_WEIGHTS and getattr(kind, "forward", None) is not nn.Module.forward


def state_of(module: nn.Module, path: str = "") -> list[tuple[Role, str, Tensor]]:
    """Return the module's tensors, with those of modules inside it that cannot be called, such as nn.ParameterList."""
    values = [(role, path + name, x) for role, name, x in call_values(_STATE, module, (), {}, None)]
    for key, child in module._modules.items():
        if child is not None and not may_be_called(child):
            values += state_of(child, f"{path}{key}.")
    return values


def state_tensors(optimizer: Optimizer, names: dict[int, str]) -> Iterator[tuple[Role, str, Tensor]]:
    """Yield role, label and value of an optimizer's tensors: `exp_avg[0.weight]`, with the name of its parameter.

    `names` are those of the model's parameters, by id. Another parameter, such as a float32 copy of a weight, is called
    by its place, `[group][position]`, and comes itself too, as a weight: `param[0][3]`. The state has the role of
    buffers.
    """
    for number, group in enumerate(optimizer.param_groups):
        for position, x in enumerate(group["params"]):
            name = names.get(id(x))
            where = f"[{number}][{position}]" if name is None else f"[{name}]"
            if name is None:
                yield "weight", f"param{where}", x
            for key, value in optimizer.state.get(x, {}).items():
                if isinstance(value, Tensor):
                    yield "buffer", f"{key}{where}", value


def observe(
    value: Any,
    label: str,
    role: Role,
    allow_inf: bool | Excuses = False,
    batch: int | None = None,
    *,
    wanted: Settings = _NOTHING,
) -> Record:
    """Return the record of `value`: its range when it is a tensor that can be read, else the note with the reason.

    Never raises, builds no graph, and calls no function or dispatch mode of the user's. A non-finite tensor, or one
    that looks like an additive mask, is read a second time for the counts and the index. `allow_inf` says that its
    infinities are meant, or is the Excuses of the module. `wanted` says what the record has besides: counts, a
    fingerprint, and for an output in the batches that are due a sketch. A quantized tensor of a library's own class has
    none of these. Where it is non-finite, the record is that of the inner tensor that is, as `weight.scale`.
    """
    if not issubclass(type(value), Tensor):  # what an object says of its class may be anything
        reason = Note("absent" if value is None else "not_a_tensor")
        return _unread(label, role, Note("not_checked", value) if isinstance(value, Unwalked) else reason)
    with only_our_dispatch():
        x = dequantized(value)
        x, wanted = (value, wanted) if x is None else (x, _NOTHING)
        record = _read(x, label, role, wanted.fingerprints)
        if x is not value and record.isfinite is False:
            parts = [(part, _read(part, name, role, False)) for name, part in inner_tensors(value, label)]
            x, record = next((pair for pair in parts if pair[1].isfinite is False), (x, record))
        if record.isfinite is None:
            return record
        record = _examine(x, record, allow_inf, wanted.counts)
        is_due = role == "output" and wanted.sketches and batch is not None and batch % wanted.sketches == 0
        return _sketched(x, record) if is_due else record


def with_absorbed(records: list[Record], values: Iterable[tuple[Role, str, Any]]) -> list[Record]:
    """Return the records of a call. A nan that an input has and no output gets the note "absorbed".

    Data marks missing values so. An inf may have overflowed, and a router turns a computed nan into a choice.
    """
    faults = [(record, x) for record, (_, _, x) in zip(records, values, strict=True) if record.is_fault]
    healths = [record.health for record, x in faults if record.role == "input" and not x.requires_grad]
    is_nan_alone = len(healths) == len(faults) and all(x and not x.num_posinf + x.num_neginf for x in healths)
    if not is_nan_alone or not any(x.role == "output" and x.ends and x.isfinite for x in records):
        return records
    return [record._replace(note=Note("absorbed")) if record.is_fault else record for record in records]


def observe_all(values: Sequence[tuple[Role, str, Tensor]], wanted: Settings) -> list[Record]:
    """Return the record of each value as `observe` makes it: those of plain and finite tensors from one read of all."""
    records = []
    with only_our_dispatch():
        plain = [x for _, _, x in values if type(x) in (Tensor, nn.Parameter) and is_plain(x)]
        ranges = dict(zip(map(id, plain), _ranges(plain), strict=True))
        for role, label, x in values:
            record, span = None, ranges.get(id(x))
            if span is not None and span.isfinite and not (wanted.counts or wanted.fingerprints):
                record = Record(label, role, tuple(x.shape), _spelled(x.dtype), *span, None)
            is_mask = record is not None and record.abs_min == 0 and may_be_finite_mask(x, record)
            records.append(observe(x, label, role, wanted=wanted) if record is None or is_mask else record)
    return records


def nonfinite(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return those that hold a nan or an inf, from one read of all. A tensor that cannot be read is left out."""
    given = list(tensors)
    if _extension.C is not None and _extension.C.are_finite(given):
        return []
    with only_our_dispatch():
        spans = [span or observe(x, "", "gradient") for x, span in zip(given, _ranges(given), strict=True)]
    return [x for x, span in zip(given, spans, strict=True) if span.isfinite is False]


def _ranges(tensors: list[Tensor]) -> Sequence[AbsRange | None]:
    """Return the range of each tensor, None where one of them cannot be read or memory is short."""
    try:
        # The compiled reader takes no call of Python for a tensor. On a GPU one launch for all waits once.
        if _extension.C is not None and {x.device.type for x in tensors} == {"cpu"}:
            return [abs_range(x) for x in tensors]
        if not any(map(is_captured, tensors)):
            return abs_ranges(tensors)
    except Exception:
        suppressed("tensors could not be read in one call")
    return [None] * len(tensors)


def _unread(
    label: str, role: Role, note: Note, shape: tuple[int, ...] | None = None, dtype: str = ""
) -> Record:
    return Record(label, role, shape, dtype, None, None, None, None, note)


def _read(x: Tensor, label: str, role: Role, fingerprints: bool) -> Record:
    shape, dtype = _form(x)
    try:
        if not is_captured(x):
            x = x if role == "gradient" or fingerprints else _unsummed(x)
            span, bits = range_and_fingerprint(x) if fingerprints else (abs_range(x), None)
            # By name: importing DTensor where nobody uses it costs 0.3 s.
            note = _shard_note(x) if type(x).__name__ == "DTensor" else None
            return Record(label, role, shape, dtype, *span, None, note, bits)
        reason = CAPTURED
    except Exception as error:
        reason = type(error).__name__
        with suppressing("a tensor and its error say nothing"):
            reason = unreadable(x) or spell(error)
    return _unread(label, role, Note("not_checked", reason), shape, dtype)


def _unsummed(x: Tensor) -> Tensor:
    """Return `x`, a sparse one over the same memory as if no position were there twice.

    To sum repeated positions takes longer than the product that a graph's adjacency matrix is for.
    """
    if x.layout is not torch.sparse_coo or x.is_coalesced() or x._values().numel() >= x.numel():
        return x
    indices, values = x._indices(), x._values()
    return torch.sparse_coo_tensor(indices, values, x.shape, is_coalesced=True, check_invariants=False)


_spelled = cache(readable.dtype_name)  # making the name takes as long as reading a small tensor


def _form(x: Tensor) -> tuple[tuple[int, ...] | None, str]:
    """Return shape and dtype as far as the tensor tells them. Any attribute of a subclass may raise."""
    shape, dtype = None, ""
    with suppressing("a tensor's dtype or shape raised"):
        dtype = _spelled(x.dtype)
        # A size that is known only as a symbol, or a nested tensor's ragged one, is no number.
        shape = tuple(map(int, x.shape))
    return shape, dtype


def _examine(x: Tensor, record: Record, allow_inf: bool | Excuses, counts: bool) -> Record:
    if record.isfinite and record.abs_min != 0 and not counts:
        return record
    # The range already says what matters. The counts are an extra.
    with suppressing("the elements of a tensor could not be counted"):
        if record.isfinite is False or (record.abs_min == 0 and may_be_finite_mask(x, record)):
            health = tensor_health(x)
            plain = record.role in ("input", "buffer") and is_mask(x, health)
            record = _with_health(x, record, health, plain, allow_inf)
        if counts and record.isfinite:
            record = record._replace(health=tensor_health(x))
    return record


def _with_health(
    x: Tensor | None, record: Record, health: TensorHealth, plain_mask: bool, allow_inf: bool | Excuses
) -> Record:
    kind = excuse(x, record, health, allow_inf, plain_mask)
    note = PLAIN_MASK if plain_mask else record.note if kind is None else Note(kind)
    # A finite mask: its range says nothing about the model, and its counts nothing that the note does not.
    return record._replace(health=None if record.isfinite else health, note=note)


def completed_record(
    label: str,
    role: Role,
    shape: tuple[int, ...],
    dtype: str,
    values: list[float] | str,
    allow_inf: bool | Excuses,
) -> Record:
    """Return the record of a tensor that a device has read, as `observe` would have made it.

    `values` are those of NanwatchRow (range_cuda.h): the range alone, or the health and the sign of a mask; or, as a
    string, the reason why there are none.
    """
    if isinstance(values, str):
        return _unread(label, role, Note("not_checked", values), shape, dtype)
    record = Record(label, role, shape, dtype, values[0], values[1], values[2] != 0, None)
    if len(values) == 3:
        return record
    plain_mask = role in ("input", "buffer") and len(shape) > 0 and values[11] != 0
    # The tensor is gone. A row that is masked everywhere shows as nan in the output.
    return _with_health(None, record, health_of(values[:11], shape), plain_mask, allow_inf)


class _SketchedRecord(Record):
    """Record of an output with its sketch, up to 512 KiB, until somebody takes it."""

    sketch: bytes


def _sketched(x: Tensor, record: Record) -> Record:
    # Memory may be short. The range already says what matters.
    with suppressing("a tensor could not be sketched"):
        local = local_shard(x)
        x = x if local is None else local
        if x.is_floating_point() and is_plain(x) and x.numel():
            record = _SketchedRecord(*record)
            record.sketch = sketch(x).cpu().numpy().astype("<f4").tobytes()
    return record


def take_sketch(record: Record) -> bytes | None:
    """Return the sketch of a record, None where there is none, and remove it: the recorder's ring keeps the record."""
    return vars(record).pop("sketch", None) if isinstance(record, _SketchedRecord) else None


def holds_fractions(x: Tensor) -> bool:
    """Return whether the dtype is a floating-point or a complex one. Asks the tensor past `__torch_function__`."""
    with torch._C.DisableTorchFunction():
        return x.is_floating_point() or x.is_complex()


def _shard_note(x: Any) -> Note:
    """Return the note of a DTensor's record, found without a communication. Never raises."""
    with suppressing("a DTensor did not tell its placement"):
        here = x.device_mesh.get_coordinate()
        return _placement_note(x.device_mesh, x.placements, None if here is None else tuple(here))
    return Note("local_shard")  # which is true of every DTensor


# A model has some hundred placements, and each is asked for in every batch. With the coordinate: meshes of two process
# groups, one after the other, may be equal.
@lru_cache(4096)
def _placement_note(mesh: Any, placements: tuple[Any, ...], here: tuple[int, ...] | None) -> Note:
    if here is None:
        return Note("local_shard", placement="none on this rank")
    places = zip(placements, _mesh_places(mesh, here), strict=True)
    return Note("local_shard", placement=", ".join(f"{kind!r} at {place}" for kind, place in places))


def _mesh_places(mesh: Any, here: tuple[int, ...]) -> list[str]:
    names = mesh.mesh_dim_names or [f"mesh[{i}]" for i in range(mesh.ndim)]
    places = zip(names, here, mesh.shape, strict=True)
    return [f"{name}={coordinate} of {size}" for name, coordinate, size in places]


def parameter_mesh(model: nn.Module | None) -> tuple[str, ...]:
    """Return `dp=1 of 4` for each dimension of the meshes that parameters of `model` are sharded over. Never raises.

    During a call FSDP has plain tensors in place of its parameters.
    """
    places: dict[str, None] = {}
    with suppressing("the device meshes of the parameters could not be told"):
        x: Any
        for x in () if model is None else each_parameter(model):
            if type(x).__name__ == "DTensor" and (here := x.device_mesh.get_coordinate()):
                places |= dict.fromkeys(_mesh_places(x.device_mesh, tuple(here)))
    return tuple(places)
