"""The faulty batch once more, each operation of the guilty call looked at: which one made the bad value, and where.

The second run builds no graph and leaves nothing behind: `BatchStart.again` puts back what it changed.
"""

from __future__ import annotations

from torch import Tensor, nn

from ..instrumentation.wrapped_names import find_module, name_of, unwrapped
from ..recording.observe import observe
from ..recording.walk import call_leaves
from ..report.errors import spell
from ..report.finding import Finding
from ..report.record import to_record
from ..report.spreading import spreads_of
from .batch_start import BatchStart, no_second_run
from .damage import describe
from .examination import Examination
from .lineage import Lineage
from .scene import Scene


def examine(start: BatchStart, finding: Finding, *, model: nn.Module) -> Examination:
    """Run the batch of `finding` once more and see which operation made the bad value.

    `model` is the watched root, in which the names of the finding are names. Takes one run of the batch, in which the
    operations of the guilty module's calls are read, inputs and outputs; a value that was in a weight, a buffer or the
    data is only described. Raises nothing of its own: what could not be done is a remark.
    """
    try:
        if finding.origin in ("weight", "buffer"):
            return _of_state(finding, model)
        if finding.origin == "data":
            return _of_data(start, finding, model)
        if reason := no_second_run():
            return Examination(remarks=(f"the batch was not run a second time: {reason}",))
        return _of_second_run(start, finding, model)
    except Exception as error:
        return Examination(remarks=(f"the finding could not be examined: {spell(error)}",))


def _of_state(finding: Finding, model: nn.Module) -> Examination:
    module = _module(model, finding.module)
    own = {} if module is None else {**module._parameters, **module._buffers}
    x = own.get(finding.label)
    if x is None:
        return Examination()
    return Examination(extent=describe(x), index=_first_bad(x), spreads=spreads_of(x, finding.label))


def _of_data(start: BatchStart, finding: Finding, model: nn.Module) -> Examination:
    bad = [
        (label, x)
        for label, x in call_leaves(start.args, start.kwargs)
        if isinstance(x, Tensor) and to_record(observe(x, label, "input")).is_fault
    ]
    remarks = []
    for label, x in bad:
        words = describe(x)
        remarks.append(f"{label} of the batch is not finite" + (f": {words}" if words else ""))
        if any(x is given and x._version != version for _, given, version in start.versions):
            remarks.append(f"{label} of the batch was written to, in place, since it began")
    # Of an inner call the label is that module's: its value is known by where it is bad.
    is_outermost = _module(model, finding.module) is unwrapped(start.module)
    same = (
        dict(bad).get(finding.label)
        if is_outermost
        else next((x for _, x in bad if _is_that(x, finding)), None)
    )
    if same is None:
        # The model has given it another shape.
        extent = next((f"of {label} of the batch: {describe(x)}" for label, x in bad), "")
        return Examination(extent=extent, remarks=tuple(remarks))
    return Examination(
        extent=describe(same),
        index=_first_bad(same),
        remarks=tuple(remarks),
        spreads=spreads_of(same, finding.label),
    )


def _is_that(x: Tensor, finding: Finding) -> bool:
    """Whether `x` may be the tensor of the finding: as large, and bad at as many places, the first the same."""
    health = observe(x, "", "output")[7]
    if health is None or finding.index is None:
        return False
    num_bad = health.num_nan + health.num_posinf + health.num_neginf
    return (health.numel, num_bad, health.first_nonfinite) == (
        finding.numel,
        finding.num_nonfinite,
        finding.index,
    )


def _first_bad(x: Tensor) -> tuple[int, ...] | None:
    health = observe(x, "", "output")[7]
    return None if health is None else health.first_nonfinite


def _of_second_run(start: BatchStart, finding: Finding, model: nn.Module) -> Examination:
    suspect = _module(model, finding.module)
    if suspect is None:
        return Examination(remarks=(f"the model has no module {finding.module!r} any more",))
    examined: nn.Module | None
    name = finding.module if finding.origin == "produced" else finding.source_module
    if name is None:
        examined, name = start.module, name_of(model, start.module)
    else:
        examined = _module(model, name)
    if examined is None:
        return Examination(remarks=(f"the model has no module {name!r} any more",))
    scene = Scene(finding, suspect, examined, name, Lineage(_run.__code__))
    failure = _run(scene, start)
    if scene.found is not None:
        return scene.found
    if failure:
        return Examination(remarks=(f"the second run of the batch raised {failure}", *start.doubts()))
    if not scene.was_called:
        scene.trouble.append(f"the second run did not call {finding.module or 'the root module'}")
    if doubts := start.doubts():
        doubts.insert(0, "the second run of the batch did not make the value again, which says little here")
    return Examination(transient=None if doubts or scene.trouble else True, remarks=(*scene.trouble, *doubts))


def _run(scene: Scene, start: BatchStart) -> str:
    """Make the batch's outermost call again, with the scene in place; what it raised, in words, or ""."""
    try:
        with start.again() as call, scene.in_place():
            call()
    except Exception as error:
        return spell(error)
    return ""


def _module(model: nn.Module, name: str) -> nn.Module | None:
    found = find_module(model, name)
    return None if found is None else found.module
