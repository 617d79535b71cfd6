"""The call whose backward made a bad gradient once more, each operation of its backward looked at.

The loss is no part of the model, so the gradients of the call's outputs are not there a second time. Gradients of the
size that was seen stand in for them: an operation whose derivative is not finite shows with any, an overflow with those
as large as the largest.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
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
from .observe import observe
from .record import Record, to_record
from .stand_in import stand_in
from .walk import leaves

_LINE = re.compile(r'File "(.+)", line (\d+)')


class _Found(Exception):  # noqa: N818 - ends the run, and is no error
    """What was looked for is found."""


def examine_backward(
    start: BatchStart, finding: Finding, frames: Sequence[Frame], *, model: nn.Module
) -> Examination:
    """Run the batch of `finding` once more, and the backward of the guilty module's calls; see which operation makes
    a bad gradient of finite ones.

    `frames` are the report's. Raises nothing of its own: what could not be done is a remark.
    """
    name = finding.module if finding.origin == "produced" else finding.source_module
    if name is None:
        return Examination(
            remarks=("what made it lies behind the model's outputs, so it was not looked for in the model",)
        )
    if reason := no_second_run():
        return Examination(remarks=(f"the batch was not run a second time: {reason}",))
    try:
        guilty = model.get_submodule(name)
        if not (magnitudes := _magnitudes(finding, frames, name)):
            return Examination(
                remarks=(
                    "no gradient of its outputs was seen, so there was none to start a second backward from",
                )
            )
        scene = _Scene(magnitudes)
        with start.again() as call, stand_in({guilty}, scene.run):
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
            if label.startswith("output") and record.isfinite and record.abs_max:
                found[label] = [record.abs_min or record.abs_max / 1024, record.abs_max]
    return found


class _Scene:
    """Makes the calls of the guilty module, and the backward of each."""

    def __init__(self, magnitudes: dict[str, list[float]]) -> None:
        self.found = Examination()
        self._magnitudes = magnitudes

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
                for attempt in (0, 1):
                    self._backward(outputs, wanted, attempt)
        return tree_map_only(Tensor, torch.detach, output)

    def _backward(self, outputs: dict[str, Tensor], wanted: list[Tensor], attempt: int) -> None:
        seen = {label: sizes[attempt] for label, sizes in self._magnitudes.items() if label in outputs}
        if not seen:
            return
        roots = [outputs[label] for label in seen]
        gradients = [torch.full_like(outputs[label], size) for label, size in seen.items()]
        steps: list[Examination] = []
        handles = [
            node.register_hook(_looker(node, steps)) for node in _nodes(x.grad_fn for x in roots) if node
        ]
        try:
            torch.autograd.grad(roots, wanted, gradients, retain_graph=True, allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        if steps:
            self.found = steps[0]
            raise _Found


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
