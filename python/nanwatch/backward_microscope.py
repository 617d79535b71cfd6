"""The call whose backward made a bad gradient once more, each operation of its backward looked at.

The loss is no part of the model, so the gradients of the call's outputs are not there a second time. Gradients of the
size that was seen stand in for them: an operation whose derivative is not finite shows with any, an overflow with those
as large as the largest, and one in a weight's gradient with the signs that add up there. The same backward from smaller
ones shows whether a smaller loss scale would have been enough.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .batch_start import BatchStart, no_second_run
from .errors import spell
from .examination import Examination
from .finding import Finding
from .frame import Frame
from .lineage import SKIPPED_FILES
from .loss_scale import try_smaller
from .observe import observe
from .record import Record, to_record
from .stand_in import stand_in
from .walk import leaves
from .wrapped_names import find_module

_LINE = re.compile(r'File "(.+)", line (\d+)')


class _Found(Exception):  # noqa: N818 - ends the run, and is no error
    """What was looked for is found."""


def examine_backward(
    start: BatchStart,
    finding: Finding,
    frames: Sequence[Frame],
    *,
    model: nn.Module,
    loss_scale: float | None = None,
) -> Examination:
    """Run the batch of `finding` once more, and the backward of the guilty module's calls; see which operation makes
    a bad gradient of finite ones, and whether it does with a smaller loss scale too.

    `frames` are the report's, `loss_scale` is that of the failed backward, where it is known. No gradient of the user's
    is touched. Raises nothing of its own: what could not be done is a remark.
    """
    name = finding.module if finding.origin == "produced" else finding.source_module
    if name is None:
        return Examination(
            remarks=("what made it lies behind the model's outputs, so it was not looked for in the model",)
        )
    if reason := no_second_run():
        return Examination(remarks=(f"the batch was not run a second time: {reason}",))
    try:
        if (guilty := find_module(model, name)) is None:
            return Examination(remarks=(f"the model has no module {name!r} any more",))
        if not (magnitudes := _magnitudes(finding, frames, name)):
            return Examination(
                remarks=(
                    "no gradient of its outputs was seen, so there was none to start a second backward from",
                )
            )
        scene = _Scene(finding, name, magnitudes, loss_scale)
        with start.again() as call, stand_in([guilty.module], scene.run):
            try:
                call()
            except _Found:
                return scene.found
    except Exception as error:
        return Examination(remarks=(f"the backward could not be examined: {spell(error)}",))
    remark = "in a second run, with other gradients of the same size, no operation made a bad gradient"
    return Examination(remarks=(remark, *start.doubts()))


def _magnitudes(finding: Finding, frames: Sequence[Frame], name: str) -> dict[str, list[float]]:
    """For the labels of the guilty call's outputs the sizes of gradients to try, the smaller first."""
    found: dict[str, list[float]] = {}
    for frame in frames:
        if (frame.name, frame.batch, frame.phase) != (name, finding.batch, "backward"):
            continue
        for record in frame.records:
            label = record.label.removesuffix(".grad")
            # All zeros stand for themselves: zero times a pole is nan.
            if label.startswith("output") and record.isfinite and record.abs_max is not None:
                found[label] = [record.abs_min or record.abs_max / 1024, record.abs_max]
    return found


class _Scene:
    """Makes the calls of the guilty module, and the backward of each."""

    def __init__(
        self, finding: Finding, module: str, magnitudes: dict[str, list[float]], loss_scale: float | None
    ) -> None:
        self.found = Examination()
        self._label, self._index = finding.label.removesuffix(".grad"), finding.index
        self._module = f"`{module}`" if module else "the model"
        self._magnitudes = magnitudes
        self._loss_scale = loss_scale

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make one call, and its backward."""
        given: list[Tensor] = []

        def fresh(x: Tensor) -> Tensor:
            if not x.is_floating_point():
                return x
            given.append(x.detach().requires_grad_())
            return given[-1].clone()  # a leaf could not be written to

        with torch.enable_grad():
            with torch.autograd.set_detect_anomaly(True, check_nan=False):
                args, kwargs = tree_map_only(Tensor, fresh, (args, kwargs))
                output = module._call_impl(*args, **kwargs)
            wanted = [*given, *(x for x in module.parameters() if x.requires_grad)]
            outputs = {
                label: x for label, x in leaves(output, "output") if isinstance(x, Tensor) and x.requires_grad
            }
            if outputs and wanted:
                self._backward(outputs, wanted, module._parameters.get(self._label))
        return tree_map_only(Tensor, torch.detach, output)

    def _backward(self, outputs: dict[str, Tensor], wanted: list[Tensor], weight: Tensor | None) -> None:
        sizes = {label: seen for label, seen in self._magnitudes.items() if label in outputs}
        if not sizes:
            return
        roots = [outputs[label] for label in sizes]
        for attempt in (0, 1):
            gradients = [
                torch.full_like(x, size[attempt]) for x, size in zip(roots, sizes.values(), strict=True)
            ]
            self._look(roots, wanted, gradients)
        # A weight's gradient is a sum over the batch: of products with both signs equal gradients leave little.
        signs = _signs(roots, weight, self._index) if weight is not None and weight.requires_grad else []
        if signs:
            gradients = [sign * size[1] for sign, size in zip(signs, sizes.values(), strict=True)]
            self._look(roots, wanted, gradients)

    def _look(self, roots: list[Tensor], wanted: list[Tensor], gradients: list[Tensor]) -> None:
        steps: list[Examination] = []
        _run(roots, wanted, gradients, lambda node: _looker(node, steps))
        if steps:
            self.found = self._with_smaller_scale(steps[0], roots, wanted, gradients)
            raise _Found

    def _with_smaller_scale(
        self, found: Examination, roots: list[Tensor], wanted: list[Tensor], gradients: list[Tensor]
    ) -> Examination:
        """What was found, and what a smaller loss scale would do."""

        def backward(factor: float) -> list[Record]:
            made: list[Record] = []
            _run(roots, wanted, [x * factor for x in gradients], lambda _: _keeper(made))
            return made

        given = [_record(x, "") for x in gradients]
        try:
            cure = try_smaller(backward, given, self._loss_scale)
        except Exception as error:  # such as a function that cannot be run backward more often
            remark = f"could not try a smaller loss scale: {spell(error)}"
            return replace(found, remarks=(*found.remarks, remark))
        if cure is None:
            return found
        # What lies before the module gets gradients that are not there a second time.
        cure = replace(cure, what=f"{cure.what}, tried on the backward of {self._module}")
        return replace(found, cures=(cure,))


def _run(
    roots: list[Tensor], wanted: list[Tensor], gradients: list[Tensor], hook: Callable[[Any], Any]
) -> None:
    """A backward from these gradients of the roots to what is wanted, with what `hook(node)` gives at each node."""
    handles = [node.register_hook(hook(node)) for node in _nodes(x.grad_fn for x in roots) if node]
    try:
        with _without_hooks(wanted):
            torch.autograd.grad(roots, wanted, gradients, retain_graph=True, allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _without_hooks(tensors: list[Tensor]) -> Iterator[None]:
    """The user's hooks on these may add up what they are given. Emptied and filled again: the engine holds the dict."""
    own = [(hooks, dict(hooks)) for x in tensors if (hooks := x._backward_hooks)]
    try:
        for hooks, _ in own:
            hooks.clear()
        yield
    finally:
        for hooks, before in own:
            hooks.update(before)


def _signs(roots: list[Tensor], weight: Tensor, index: tuple[int, ...] | None) -> list[Tensor]:
    """For each root ones with the signs that make all it adds to this element of the weight's gradient positive.

    Empty where that cannot be told, as where an operation has no second derivative.
    """
    ones = [torch.ones_like(x).requires_grad_() for x in roots]
    try:
        with _without_hooks([weight]):
            (made,) = torch.autograd.grad(roots, [weight], ones, create_graph=True)
            found = torch.autograd.grad(made[index or ()].sum(), ones, allow_unused=True)
    except Exception:
        return []
    return [
        torch.ones_like(x) if share is None else torch.where(share < 0, -1.0, 1.0).to(x)
        for x, share in zip(roots, found, strict=True)
    ]


def _nodes(roots: Any) -> list[Any]:
    """All nodes of the graph from these roots on, each once."""
    left, known, found = list(roots), set(), []
    while left:
        node = left.pop()
        if node is not None and node not in known:
            known.add(node)
            found.append(node)
            left += [following for following, _ in node.next_functions]
    return found


def _looker(node: Any, steps: list[Examination]) -> Any:
    def look(made: Sequence[Tensor | None], given: Sequence[Tensor | None]) -> None:
        if steps or not any(_record(x, "").isfinite is False for x in made if x is not None):
            return
        records = [_record(x, f"gradient[{i}]") for i, x in enumerate(given) if x is not None]
        if any(one.isfinite is False for one in records):
            return
        steps.append(
            Examination(
                operation=node.name(),
                source=_source(node.metadata.get("traceback_", ())),
                operands=(*records, *_saved(node)),
                remarks=(
                    "the operation was found in a second run of the call, from other gradients of the same size",
                ),
            )
        )

    return look


def _keeper(records: list[Record]) -> Any:
    def look(made: Sequence[Tensor | None], _: Any) -> None:
        records.extend(_record(x, "") for x in made if x is not None)

    return look


def _saved(node: Any) -> list[Record]:
    """The tensors that the forward kept for this operation's backward."""
    found = []
    for name in dir(node):
        if name.startswith("_saved_"):
            try:
                value = getattr(node, name)
            except Exception:
                continue  # freed, or never set
            if isinstance(value, Tensor):
                found.append(_record(value, name.removeprefix("_saved_")))
    return found


def _record(x: Tensor, label: str) -> Record:
    return to_record(observe(x, label, "gradient"))


def _source(traceback: Sequence[str]) -> str | None:
    """The innermost line of the program, which is neither PyTorch's nor ours, of a formatted stack."""
    for entry in reversed(traceback):
        match = _LINE.search(entry)
        if match and not match[1].startswith(SKIPPED_FILES):
            return f"{match[1]}:{match[2]}"
    return None
