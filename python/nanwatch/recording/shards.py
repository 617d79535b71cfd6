"""Notes of a DTensor's local shard: its place in the whole, found without a communication."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from ..records.note import MeshPlace, Note, Placement
from ..util.modules import each_module
from ..util.visible import suppressed

# A model has some hundred placements, and each is asked for in every batch: computing one takes 20 times the look-up.
_MAX_KNOWN = 4096
_notes: dict[Any, Note] = {}


def shard_note(x: Any) -> Note:
    """Return the note of a DTensor's record, with its placement. Never raises."""
    try:
        mesh = x.device_mesh
        coordinate = mesh.get_coordinate()
        # With the coordinate: meshes of two process groups, one after the other, may be equal.
        key = mesh, x.placements, tuple(x.shape), None if coordinate is None else tuple(coordinate)
        note = _notes.get(key)
        if note is None:
            if len(_notes) >= _MAX_KNOWN:  # a new length of sequence in every batch
                _notes.clear()
            note = _notes[key] = _note(x, coordinate)
        return note
    except Exception:
        suppressed("a DTensor did not tell its placement")
        return Note("local_shard")  # which is true of every DTensor


def parameter_mesh(model: nn.Module | None) -> tuple[str, ...]:
    """Return `dp=1 of 4` for each dimension of the meshes that parameters of `model` are sharded over. Never raises.

    Includes parameters that FSDP has gathered for the call under way, which are plain tensors meanwhile.
    """
    meshes: dict[int, Any] = {}
    try:
        for _, module in () if model is None else each_module(model):
            for x in (*module._parameters.values(), *_gathered(module)):
                if type(x).__name__ == "DTensor":
                    meshes.setdefault(id(x.device_mesh), x.device_mesh)
        said = (
            MeshPlace("", name, here, size).where
            for mesh in meshes.values()
            for name, here, size in zip(_names(mesh), mesh.get_coordinate() or (), mesh.shape, strict=False)
        )
        return tuple(dict.fromkeys(said))
    except Exception:  # a report is worth more than its place
        suppressed("the device meshes of the parameters could not be told")
        return ()


def _gathered(module: Any) -> Iterator[Any]:
    """Yield the sharded parameters of an FSDP2 group, which keeps them private while they are gathered."""
    if not hasattr(type(module), "_get_fsdp_state"):
        return
    state = module._get_fsdp_state()
    # A list in torch 2.13; in 2.8 there is one group or none.
    for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
        for one in () if group is None else group.fsdp_params:
            yield one.sharded_param


def _names(mesh: Any) -> list[str]:
    return [str(name) for name in mesh.mesh_dim_names or (f"mesh[{i}]" for i in range(mesh.ndim))]


def _note(x: Any, coordinate: Any) -> Note:
    if coordinate is None:
        return Note("local_shard", placement=Placement((), None))
    mesh = x.device_mesh
    places = [
        MeshPlace(_kind(placement), name, here, mesh.size(i))
        for i, (placement, name, here) in enumerate(zip(x.placements, _names(mesh), coordinate, strict=True))
    ]
    return Note("local_shard", placement=Placement(tuple(places), _start(x, coordinate)))


def _kind(placement: Any) -> str:
    values = [getattr(placement, name, None) for name in ("dim", "split_factor", "reduce_op")]
    said = ", ".join(str(value) for value in values if value is not None)
    kind = type(placement).__name__.lstrip("_")
    return f"{kind}({said})" if said else kind


def _start(x: Any, coordinate: Any) -> tuple[int, ...] | None:
    """Return where the shard begins in the whole tensor, if a dimension is sharded and the shard is one block."""
    held = [[(0, size)] for size in x.shape]
    is_cut = False
    for placement, here, ranks in zip(x.placements, coordinate, x.device_mesh.shape, strict=True):
        if not placement.is_shard() and type(placement).__name__ != "_StridedShard":
            continue
        is_cut = True
        # Strided: each of so many parts is shared out among the ranks by itself.
        parts = range(getattr(placement, "split_factor", 1))
        dim = placement.dim
        cut = [_chunk(held[dim], part, len(parts)) for part in parts]
        held[dim] = _united(block for part in cut for block in _chunk(part, here, ranks))
    sizes = [sum(end - begin for begin, end in blocks) for blocks in held]
    if not is_cut or sizes != list(x.to_local().shape) or any(len(blocks) != 1 for blocks in held):
        return None
    return tuple(blocks[0][0] for blocks in held)


def _chunk(blocks: list[tuple[int, int]], number: int, count: int) -> list[tuple[int, int]]:
    """Return part `number` of torch.chunk(count) over these blocks laid end to end."""
    size = sum(end - begin for begin, end in blocks)
    most = -(-size // count)
    first, last = number * most, min((number + 1) * most, size)
    found, at = [], 0
    for begin, end in blocks:
        low, high = max(first, at), min(last, at + end - begin)
        if low < high:
            found.append((begin + low - at, begin + high - at))
        at += end - begin
    return found


def _united(blocks: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for begin, end in blocks:
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return found
