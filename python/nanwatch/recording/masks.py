"""Values that are meant although they are not finite: masks, and what the options allow in a module.

-inf in the scores of a softmax, in an argument that is called a mask, or in what a maximum is taken of stands for
"left out". The output shows no trace of it as long as each row has a finite score.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..numerics._reference import without_repeats
from ..numerics.readable import local_shard, only_our_dispatch
from ..records.record import NoteKind
from ..util.messages import suppressing

if TYPE_CHECKING:
    from ..numerics.formats import TensorHealth
    from ..records.record import Record, Role

_SOFTMAXES = (nn.Softmax, nn.LogSoftmax, nn.CrossEntropyLoss)
_MAXIMA = (
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
)
# What autograd calls a matrix product, and the steps between it and a softmax that mask nothing.
_PRODUCTS = ("MmBackward0", "BmmBackward0", "AddmmBackward0")
_NEUTRAL = ("DivBackward0", "MulBackward0", "ToCopyBackward0", "UnsafeViewBackward0", "ViewBackward0")
_PADDINGS = (nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)
# Words in the name of a parameter that may hold -inf, such as `attn_mask`, or ALiBi's distances in `attn_bias`.
_MASK_WORDS = ("mask", "bias", "alibi")


# Version, counts and note of an excused tensor as it was: a module may hand it on, and the model return it.
_excused = WeakIdKeyDictionary()


class Excuses:
    """Judge of the non-finite values in the calls of one module.

    `inf` and `nan`: the options allow them in this module. `reads_inputs`: the module's inputs are read. Otherwise the
    output of a log-softmax is judged by itself.
    """

    def __init__(
        self, module: nn.Module, *, inf: bool = False, nan: bool = False, reads_inputs: bool = True
    ) -> None:
        self._module = weakref.ref(module)
        self._inf, self._nan, self._reads_inputs = inf, nan, reads_inputs
        self._labels = masked_labels(type(module))
        self._is_log = isinstance(module, nn.LogSoftmax)
        # In this thread's call: how many scores are masked in what the module was given.
        self._given = threading.local()

    def kind(self, x: Tensor | None, role: Role, label: str, health: TensorHealth) -> NoteKind | None:
        """Return the note of a tensor whose non-finite values are meant, else None.

        Without the tensor, which a device has read later, the counts decide. They do not tell a row without a score.
        """
        if (self._nan or not health.num_nan) and (self._inf or not health.num_posinf + health.num_neginf):
            return "allowed"
        is_neginf = bool(health.num_neginf) and not health.num_nan and not health.num_posinf
        masked, self._given.masked = getattr(self._given, "masked", 0), 0
        if not is_neginf:
            return None
        is_given = role == "input" and label in self._labels
        if is_given:
            self._given.masked = health.num_neginf
        if is_given or (role == "output" and self._is_log and not self._reads_inputs):
            return None if x is not None and self._is_no_mask(x) else "mask"
        module = self._module()
        is_padding = isinstance(module, _PADDINGS) and module.value == -torch.inf
        is_meant = is_padding or (self._is_log and masked == health.num_neginf)
        return "mask" if role == "output" and is_meant else None

    def _is_no_mask(self, x: Tensor) -> bool:
        """Return whether a row has no finite score, or scores have left the format.

        A mask leaves the others as they are: scores near one end say that some have left it at the other. Scores that
        autograd says are a product, perhaps scaled, were never masked.
        """
        module = self._module()
        if isinstance(module, _MAXIMA):
            return False  # an empty window shows in the output
        dim = getattr(module, "dim", None) if isinstance(module, _SOFTMAXES) else -1
        if dim is None:
            # The default of torch.nn.functional.softmax; the classes of a loss come after the samples.
            dim = 0 if x.ndim < 2 or (x.ndim == 3 and not isinstance(module, nn.CrossEntropyLoss)) else 1
        with only_our_dispatch(), torch.no_grad():
            local = local_shard(x)
            values = (x if local is None else local).detach()
            is_score = isinstance(module, _SOFTMAXES)
            if is_score and (_is_product(x) or bool((values > torch.finfo(values.dtype).max / 4).any())):
                return True
            return bool((values == -torch.inf).all(dim=dim).any())


def _is_product(x: Tensor) -> bool:
    node = x.grad_fn
    while node is not None and node.name() in _NEUTRAL:
        node = node.next_functions[0][0]
    return node is not None and node.name() in _PRODUCTS


def excuses(
    module: nn.Module, *, inf: bool = False, nan: bool = False, reads_inputs: bool = True
) -> bool | Excuses:
    """Return the Excuses of a module that may hold masks or allowed nans, else whether infinities are allowed."""
    if nan or masked_labels(type(module)) or isinstance(module, _PADDINGS):
        return Excuses(module, inf=inf, nan=nan, reads_inputs=reads_inputs)
    return inf


# Inspecting a forward takes 30 µs, and a model has hundreds of modules of one class.
_labels: weakref.WeakKeyDictionary[type[nn.Module], frozenset[str]] = weakref.WeakKeyDictionary()


def masked_labels(module_type: type[nn.Module]) -> frozenset[str]:
    """Return the labels of the arguments in which -inf may stand for "left out"."""
    if module_type in _labels:
        return _labels[module_type]
    named: list[tuple[int, str]] = []
    # A forward that is no Python function, as that of a ScriptModule, has no signature.
    with suppressing("the arguments of a forward could not be told"):
        parameters = [*inspect.signature(module_type.forward).parameters.values()][1:]
        named = [(i, x.name) for i, x in enumerate(parameters) if x.kind is not x.VAR_POSITIONAL]
    if issubclass(module_type, _SOFTMAXES + _MAXIMA):
        named = named[:1]
    else:
        named = [(i, name) for i, name in named if any(word in name for word in _MASK_WORDS)]
    labels = (label for i, name in named for label in (f"input[{i}]", f"input[{name}]"))
    return _labels.setdefault(module_type, frozenset(labels))


def excuse(
    x: Tensor | None, record: Record, health: TensorHealth, allowed: bool | Excuses, plain_mask: bool
) -> NoteKind | None:
    """Return the note of a tensor whose values are meant, and remember the tensor; None for any other.

    A tensor that a device has read is None. `plain_mask` is what `is_mask` says.
    """
    if record.isfinite:
        return None
    kind: NoteKind | None = "mask" if plain_mask else None
    if isinstance(allowed, Excuses):
        kind = kind or allowed.kind(x, record.role, record.label, health)
    elif allowed and not health.num_nan:
        kind = "allowed"
    # A tensor made in inference mode has no version, so that nothing tells when it changes.
    if x is None or x.is_inference():
        return kind
    version, counts = x._version, (health.num_nan, health.num_posinf, health.num_neginf)
    if kind is not None:
        _excused[x] = version, counts, kind
        return kind
    base = x if x._base is None else x._base
    *known, kind = _excused.get(x) or _excused.get(base) or (None, None, None)
    return kind if known == [version, counts] else None


def may_be_finite_mask(x: Tensor, record: Record) -> bool:
    """Return whether the range is that of an additive mask made with the dtype's minimum in place of -inf."""
    may_mask = record.role in ("input", "buffer") and _masks_with_lowest(x.dtype)
    return may_mask and record.abs_max == torch.finfo(x.dtype).max


def _masks_with_lowest(dtype: torch.dtype) -> bool:
    """Return whether masks may hold the dtype's minimum. In 8 bits, finite tensors are full of it by saturation."""
    return dtype.is_floating_point and dtype.itemsize > 1


def is_mask(x: Tensor, health: TensorHealth) -> bool:
    """Return whether the tensor is an additive attention mask.

    A mask holds zeros and -inf, or zeros and the dtype's minimum, and nothing else. Every row has a zero, or softmax
    would make nan of it. It comes as an argument or is a buffer; the same values in an output are the log of a zero
    probability. Of a DTensor the local shard decides: to ask the other ranks is a communication, in which ranks that
    see no -inf would not take part.
    """
    has_others = health.num_nan or health.num_posinf or not health.num_zero
    if has_others or not x.dtype.is_floating_point or x.ndim == 0 or _is_product(x):
        return False
    with torch.no_grad():
        local = local_shard(x)
        values, repeats = without_repeats((x if local is None else local).detach())
        num_masked = health.num_neginf
        if num_masked == 0 and _masks_with_lowest(x.dtype):
            num_masked = repeats * int((values == torch.finfo(x.dtype).min).sum())
        are_all = num_masked > 0 and health.num_zero + num_masked == health.numel
        return are_all and bool((values == 0).any(dim=-1).all())
