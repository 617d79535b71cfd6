"""Runs of a model with some of its linear layers in other formats: their losses, and how far gradients move."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...instrumentation.execution_context import RngState
from ...numerics.ranges import fingerprint
from ...precision.emulation import Rounding, emulated, linear_layers
from ...recording.walk import leaves
from ...util.modules import each_module
from ...util.progress import Tell
from ..state import State, digest
from .predictions import Predictions, Seen, differences

LossFunction = Callable[[Any], Tensor]
# In `Outcome.gradients`, the weights of all linear layers as one vector.
ALL = ""


class Distance(NamedTuple):
    """How far a gradient is from that of the model as it is: the norm of the difference over the norm, the cosine."""

    error: float
    cosine: float


class Outcome(NamedTuple):
    """Loss of a run, and the distances of its gradients by layer where it trains.

    `error` is the standard error of the loss's change, and `divergence` how far the predictions are from those of the
    model as it is, in the unit of the loss; None where the loss is neither a cross-entropy nor a squared error.
    """

    loss: float
    gradients: dict[str, Distance]
    error: float | None = None
    divergence: float | None = None


class Forwards:
    """Makes runs of one model on one batch, all with the same random numbers, and counts them in `made`.

    Each outcome is appended to the file `journal`, if any, and taken from there when it is asked for again, also by
    another process with the same model, batch and options.
    """

    def __init__(
        self,
        model: nn.Module,
        batch: Any,
        loss: LossFunction | None,
        rounding: Rounding,
        journal: Path | None,
        tell: Tell,
    ) -> None:
        self.layers = linear_layers(model)
        self.multiplications = dict.fromkeys(self.layers, 0)
        self.made = 0
        self.expected = 0
        self._model, self._batch, self._loss, self._rounding = model, batch, loss, rounding
        self._tell, self._journal = tell, journal
        self._known = {} if journal is None else _read(journal)
        self._weights = {name: x.weight for name, x in self.layers.items() if x.weight.requires_grad}
        if rounding.backward and not self._weights:
            raise ValueError(
                "train=True (--train) needs gradients, and no weight of a linear layer requires one"
            )
        self._reference: dict[str, Tensor] = {}
        self._predictions: Predictions | None = None  # of the first run
        self.loss_dtype = torch.float32

    @contextmanager
    def same_start(self) -> Iterator[None]:
        """Let each run start with the same random numbers and buffers, and put both back after the block."""
        before = RngState.capture(others=True)
        buffers = [x for _, one in each_module(self._model) for x in one._buffers.values() if x is not None]
        inputs = [x for _, x in leaves(self._batch, "") if isinstance(x, Tensor)]
        try:
            torch.manual_seed(0)
            random.seed(0)
            self._state = State([*buffers, *inputs])
            self._guard = self._fingerprint()
            with self._state.kept():
                yield
        finally:
            before.restore()

    def as_it_is(self) -> tuple[Outcome, float]:
        """Return the outcome of the model as it is, and how far the loss of a second such run is from it."""
        first = self._run({}, self.multiplications.__setitem__)
        second = self.outcome({})
        return first, abs(second.loss - first.loss)

    def outcome(self, formats: Mapping[str, str]) -> Outcome:
        """Return the outcome with these layers in these formats, by a run unless it is known."""
        words = json.dumps([self._guard, dict(sorted(formats.items()))])
        key = hashlib.sha256(words.encode()).hexdigest()
        if key not in self._known:
            outcome = self._run(formats, None)
            self._known[key] = outcome
            if self._journal is not None:
                with self._journal.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, **outcome._asdict()}) + "\n")
        return self._known[key]

    def _fingerprint(self) -> str:
        """Return a text that differs where weights, batch or options do."""
        tensors = {**dict(self._model.named_parameters()), **dict(self._model.named_buffers())}
        modes = [one.training for _, one in each_module(self._model)]
        loss = getattr(self._loss, "__qualname__", "")
        parts = [f"{name} {fingerprint(x)}" for name, x in tensors.items()]
        parts += [digest(self._batch), repr((modes, loss, self._rounding, torch.__version__))]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def _run(self, formats: Mapping[str, str], count: Callable[[str, int], object] | None) -> Outcome:
        self.made += 1
        self._tell("running the model in other formats", self.made, max(self.expected, self.made), "forwards")
        self._state.restore()
        trains, batch = self._rounding.backward, self._batch
        kwargs = dict(batch) if isinstance(batch, Mapping) else {}
        args = () if isinstance(batch, Mapping) else batch if isinstance(batch, tuple) else (batch,)
        with (
            torch.set_grad_enabled(trains),
            torch.compiler.set_stance("force_eager"),
            emulated(self._model, formats, self._rounding, count=count),
        ):
            with Seen() as seen:
                loss = _loss_of(self._model(*args, **kwargs), self._loss)
            self.loss_dtype = loss.dtype
            self._predictions = self._predictions or seen.latest
            measured = differences(seen.latest, self._predictions)
            if not trains:
                return Outcome(float(loss), {}, *measured)
            gradients = torch.autograd.grad(
                loss, list(self._weights.values()), allow_unused=True, materialize_grads=True
            )
        named = dict(zip(self._weights, gradients, strict=True))
        self._reference = self._reference or named
        return Outcome(float(loss.detach()), self._distances(named, just_all=len(formats) == 1), *measured)

    def _distances(self, gradients: dict[str, Tensor], *, just_all: bool) -> dict[str, Distance]:
        sums = dict.fromkeys([ALL, *gradients], torch.zeros(4, dtype=torch.float64))
        for name, gradient in gradients.items():
            x, y = gradient.double(), self._reference[name].double()
            products = [(x - y).square().sum(), x.square().sum(), y.square().sum(), (x * y).sum()]
            sums[name] = torch.stack(products).cpu()
            sums[ALL] = sums[ALL] + sums[name]
        return {name: _distance(one) for name, one in sums.items() if name == ALL or not just_all}


def _distance(sums: Tensor) -> Distance:
    difference, own, reference, product = sums.tolist()
    if not difference:
        return Distance(0.0, 1.0)
    norm = (own * reference) ** 0.5
    return Distance(
        (difference / reference) ** 0.5 if reference else float("inf"), product / norm if norm else 0.0
    )


def _loss_of(output: Any, function: LossFunction | None) -> Tensor:
    loss: Any
    if function is not None:
        loss = function(output)
    elif isinstance(output, Mapping) and "loss" in output:
        loss = output["loss"]
    else:
        loss = getattr(output, "loss", output[0] if isinstance(output, tuple) and output else output)
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        scalar: Tensor = loss.reshape(())
        return scalar
    got = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
    raise ValueError(
        f"the batch gives no loss: expected one floating-point number from loss(output), output.loss,"
        f" output['loss'], the output or its first part, got {got}; put labels into the batch, pass loss=, or wrap the"
        " model in a module that returns its loss"
    )


def _read(journal: Path) -> dict[str, Outcome]:
    """Return the outcomes in a file. A process that was killed may have left half a line, which is cut off."""
    known: dict[str, Outcome] = {}
    if not journal.exists():
        return known
    lines = journal.read_text(encoding="utf-8").splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        journal.write_text("".join(lines[:-1]), encoding="utf-8")
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            item = json.loads(line)
            gradients = {name: Distance(*pair) for name, pair in item["gradients"].items()}
            known[item["key"]] = Outcome(float(item["loss"]), gradients, item["error"], item["divergence"])
        except (ValueError, TypeError, KeyError, AttributeError):
            raise ValueError(
                f"{journal}, line {number}: no measurement of a recipe; remove or rename the file"
            ) from None
    return known
