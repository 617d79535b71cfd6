"""Notes of records: the place of a DTensor's local shard, infinities that are masked scores, and attention masks.

The place of a shard is found without a communication. Masked scores are -inf in what nn.Softmax and nn.LogSoftmax are
given. Softmax gives zero for such a score, and log-softmax -inf, as long as its row has a finite one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..numerics._reference import without_repeats
from ..numerics.readable import local_shard, only_our_dispatch
from ..records.note import MeshPlace, Note, Placement
from ..util.modules import each_module
from ..util.visible import suppressed

if TYPE_CHECKING:
    from ..numerics.formats import TensorHealth
    from ..records.record import Record, Role

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


# Masked scores.

# The version of an excused tensor and its number of -inf: the same tensor is then handed on, and returned by the model.
_excused = WeakIdKeyDictionary()


class MaskedScores:
    """The scores of one softmax module, in the place of `allow_inf`.

    `reads_inputs` says whether the module's inputs are read. Where they are not, its output is judged by itself.
    """

    def __init__(self, module: nn.Softmax | nn.LogSoftmax, reads_inputs: bool = True) -> None:
        self._reads_inputs = reads_inputs
        self._module = weakref.ref(module)
        self._is_log = isinstance(module, nn.LogSoftmax)
        # In this thread's call: how many scores are masked in what the module was given.
        self._given = threading.local()

    def excuse(self, x: Tensor, role: Role, health: TensorHealth) -> bool:
        """Return whether each -inf of `x` is a masked score: in an input, or in what a log-softmax made of it."""
        if role == "output" and self._reads_inputs:
            return self.may_excuse(role, health)
        if role == "output":
            return self._is_log and _has_only_neginf(health) and not self._has_empty_row(x)
        self._given.masked = 0
        if role != "input" or not _has_only_neginf(health):
            return False
        return not self._has_empty_row(x) and self.may_excuse(role, health)

    def _has_empty_row(self, x: Tensor) -> bool:
        with only_our_dispatch(), torch.no_grad():
            local = local_shard(x)
            values = (x if local is None else local).detach()
            return bool((values == -torch.inf).all(dim=self._dim(x.ndim)).any())

    def may_excuse(self, role: Role, health: TensorHealth) -> bool:
        """Return the same from the counts alone, which do not tell a row without a finite score."""
        if role not in ("input", "output") or not _has_only_neginf(health):
            return False
        given = getattr(self._given, "masked", 0)
        self._given.masked = health.num_neginf if role == "input" else 0
        return role == "input" or (self._is_log and given == health.num_neginf)

    def _dim(self, ndim: int) -> int:
        module = self._module()
        dim = None if module is None else module.dim
        # The default of torch.nn.functional.
        return (0 if ndim in (0, 1, 3) else 1) if dim is None else dim


def masked_scores(module: nn.Module, reads_inputs: bool = True) -> MaskedScores | Literal[False]:
    """Return the MaskedScores of a softmax module; False for any other."""
    return MaskedScores(module, reads_inputs) if isinstance(module, nn.Softmax | nn.LogSoftmax) else False


def are_masked(x: Tensor, role: Role, health: TensorHealth, scores: MaskedScores | None) -> bool:
    """Return whether each -inf of `x` is a masked score: `scores` say so, or said so of this tensor before."""
    if scores is None:
        if x.is_inference():
            return False
        known = _excused.get(x)
        if known is None and x._base is not None:
            known = _excused.get(x._base)
        return known == (x._version, health.num_neginf) and _has_only_neginf(health)
    is_excused = scores.excuse(x, role, health)
    if is_excused and not x.is_inference():  # which has no version, so that nothing tells when it changes
        _excused[x] = x._version, health.num_neginf
    return is_excused


def _has_only_neginf(health: TensorHealth) -> bool:
    return bool(health.num_neginf) and not health.num_nan and not health.num_posinf


# Additive attention masks.


def may_be_finite_mask(x: Tensor, row: Record) -> bool:
    """Return whether the range is that of an additive mask made with the dtype's minimum in place of -inf."""
    return (
        row.role in ("input", "buffer") and _masks_with_lowest(x.dtype) and row.abs_max == _largest(x.dtype)
    )


def _masks_with_lowest(dtype: torch.dtype) -> bool:
    """Return whether masks may hold the dtype's minimum. In 8 bits, finite tensors are full of it by saturation."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _largest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).max


def is_mask(x: Tensor, health: TensorHealth) -> bool:
    """Return whether the tensor is an additive attention mask.

    A mask holds zeros and -inf, or zeros and the dtype's minimum, and nothing else. Every row has a zero, or softmax
    would make nan of it. It comes as an argument or is a buffer; the same values in an output are the log of a zero
    probability. Of a DTensor the local shard decides: to ask the other ranks is a communication, in which ranks that
    see no -inf would not take part.
    """
    if not _may_be_mask(health, x.dtype, x.ndim):
        return False
    with torch.no_grad():
        local = local_shard(x)
        values, repeats = without_repeats((x if local is None else local).detach())
        is_zero = values == 0
        num_masked = health.num_neginf
        if num_masked == 0 and _masks_with_lowest(x.dtype):
            num_masked = repeats * int((values == -_largest(x.dtype)).sum())
        if num_masked == 0 or health.num_zero + num_masked != health.numel:
            return False
        return bool(is_zero.any(dim=-1).all())


def _may_be_mask(health: TensorHealth, dtype: torch.dtype, dims: int) -> bool:
    return (
        not health.num_nan
        and not health.num_posinf
        and bool(health.num_zero)
        and dtype.is_floating_point
        and dims > 0
    )
