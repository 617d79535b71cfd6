"""Notes of a DTensor's local shard: its place in the whole, found without a communication."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..records.note import MeshPlace, Note, Placement
from ..util.modules import WeakIdentityDict, each_module
from ..util.visible import suppressed

# A model has some hundred placements, and each is asked for in every batch: computing one takes 20 times the look-up.
_MAX_KNOWN = 4096
_notes: dict[Any, Note] = {}
_seen: WeakIdentityDict[dict[str, None]] = WeakIdentityDict()


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

    Includes meshes that an earlier call has seen: during a call FSDP has plain tensors in place of its parameters.
    """
    if model is None:
        return ()
    places = _seen.get(model) or {}
    try:
        for _, module in each_module(model):
            x: Any
            for x in module._parameters.values():
                if type(x).__name__ == "DTensor":
                    mesh = x.device_mesh
                    here = mesh.get_coordinate() or ()
                    for name, coordinate, size in zip(_names(mesh), here, mesh.shape, strict=False):
                        places[MeshPlace("", name, coordinate, size).where] = None
    except Exception:  # a report is worth more than its place
        suppressed("the device meshes of the parameters could not be told")
    _seen[model] = places
    return tuple(places)


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
    return Note("local_shard", placement=Placement(tuple(places), _start(x)))


def _kind(placement: Any) -> str:
    values = [getattr(placement, name, None) for name in ("dim", "split_factor", "reduce_op")]
    arguments = ", ".join(str(value) for value in values if value is not None)
    kind = type(placement).__name__.lstrip("_")
    return f"{kind}({arguments})" if arguments else kind


def _start(x: Any) -> tuple[int, ...] | None:
    """Return where the shard begins in the whole tensor, if a dimension is sharded and the shard is one block."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    latest = {cut.dim: cut for cut in x.placements if not (cut.is_replicate() or cut.is_partial())}
    # A strided shard that no other placement cuts further is several blocks.
    if not latest or any(getattr(placement, "split_factor", 1) > 1 for placement in latest.values()):
        return None
    shape, start = compute_local_shape_and_global_offset(x.shape, x.device_mesh, x.placements)
    return tuple(start) if tuple(shape) == tuple(x.to_local().shape) else None
