"""Masked scores: -inf in what nn.Softmax and nn.LogSoftmax are given, which is no failure.

Softmax gives zero for such a score, and log-softmax -inf, as long as its row has a finite one.
"""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from ..numerics.readable import local_shard, only_our_dispatch

if TYPE_CHECKING:
    from ..numerics.formats import TensorHealth
    from ..report.record import Role

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
