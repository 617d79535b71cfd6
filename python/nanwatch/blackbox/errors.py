"""Errors of a device and of memory: what nanwatch knows about them, as a note on the exception and in the black box."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from ..instrumentation.wrapped_names import module_names
from ..numerics import _extension
from ..recording.events import Recorder
from ..util.visible import module_name, suppressing, visible
from .process import process_box

_MOST = 8
_LEAST_BYTES = 1 << 20
_NO_MEMORY = ("can't allocate memory", "out of memory", "bad_alloc")
_DEVICE = ("CUDA error", "HIP error", "CUBLAS_STATUS", "cuDNN error", "NCCL error")


def note_error(error: BaseException, model: nn.Module | None, recorder: Recorder) -> None:
    """Add what is known to an error of memory or of a device, once."""
    with suppressing("an error could not be explained"):
        if getattr(error, "_nanwatch_noted", False):
            return
        facts = _out_of_memory(error, model) if _is_memory(error) else _device_error(error, model, recorder)
        if facts is None:
            return
        error._nanwatch_noted = True  # type: ignore[attr-defined]
        if hasattr(error, "add_note"):  # from Python 3.11 on
            error.add_note(_words(facts))
        if (box := process_box()) is not None:
            box.note(**facts)


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return type(error) is RuntimeError and any(word in str(error) for word in _NO_MEMORY)


def _out_of_memory(error: BaseException, model: nn.Module | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "kind": "out of memory",
        "error": str(error)[:500],
        "module": module_of(error, model),
    }
    sizes: defaultdict[tuple[str, tuple[int, ...], str], list[int]] = defaultdict(list)
    seen: set[int] = set()
    for x in _extension.instances_of(Tensor):
        if type(x) not in (Tensor, nn.Parameter):  # a subclass may run the user's code
            continue
        with suppressing("a tensor could not be counted"):
            storage = x.untyped_storage()
            if storage.nbytes() >= _LEAST_BYTES and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                key = str(x.dtype).removeprefix("torch."), tuple(x.shape), str(x.device)
                sizes[key].append(storage.nbytes())
    largest = sorted(sizes.items(), key=lambda one: sum(one[1]), reverse=True)[:_MOST]
    facts["tensors"] = [
        {"dtype": dtype, "shape": list(shape), "device": device, "count": len(each), "bytes": sum(each)}
        for (dtype, shape, device), each in largest
    ]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        free, total = torch.cuda.mem_get_info()
        facts["allocator"] = {
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
            "free": free,
            "total": total,
        }
    return facts


def _device_error(error: BaseException, model: nn.Module | None, recorder: Recorder) -> dict[str, Any] | None:
    kind = getattr(torch, "AcceleratorError", ())
    if not isinstance(error, kind) and not (
        type(error) is RuntimeError and any(word in str(error) for word in _DEVICE)
    ):
        return None
    suspects = [
        f"{module_name(name)} ({class_name}), batch {batch}"
        for batch, name, class_name in recorder.unconfirmed_calls()
    ]
    return {
        "kind": "device error",
        "error": str(error)[:500],
        "module": module_of(error, model),
        "suspects": suspects[:64],
    }


def module_of(error: BaseException, model: nn.Module | None) -> str:
    """Return the innermost module whose code the error came from, "" where it is none of the model's."""
    names = {} if model is None else {id(module): name for module, name in module_names(model).items()}
    found, place = "", error.__traceback__
    while place is not None:
        owner = place.tb_frame.f_locals.get("self")
        if id(owner) in names:
            found = f"{module_name(names[id(owner)])} ({type(owner).__name__})"
        place = place.tb_next
    return found


def _words(facts: dict[str, Any]) -> str:
    where = f" in {facts['module']}" if facts["module"] else ""
    lines = [f"nanwatch: {facts['kind']}{where}."]
    if suspects := facts.get("suspects"):
        lines.append("The device had not confirmed the work of these calls, the oldest first:")
        lines += [f"  {one}" for one in suspects[:_MOST]]
    if tensors := facts.get("tensors"):
        lines.append("The largest tensors that Python holds:")
        lines += [
            f"  {one['bytes'] / 2**20:9,.1f} MiB  {one['count']} x {one['dtype']} {one['shape']} on {one['device']}"
            for one in tensors
        ]
    if memory := facts.get("allocator"):
        lines.append(
            "The allocator: "
            + ", ".join(f"{name} {value / 2**20:,.0f} MiB" for name, value in memory.items())
        )
    return "\n".join(map(visible, lines))
