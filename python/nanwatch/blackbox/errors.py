"""Errors of a device and of memory: what nanwatch knows about them, as a note on the exception and in the black box."""

from __future__ import annotations

from collections import defaultdict

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
        words = str(error) if type(error) is RuntimeError else ""
        if getattr(error, "_nanwatch_noted", False):
            return
        if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(
            part in words for part in _NO_MEMORY
        ):
            kind, title, lines = "out of memory", "The largest tensors that Python holds", _largest_tensors()
        elif isinstance(error, getattr(torch, "AcceleratorError", ())) or any(
            part in words for part in _DEVICE
        ):
            kind, title = "device error", "Calls whose work the device had not confirmed, the oldest first"
            lines = [
                f"{module_name(name)} ({class_name}), batch {batch}"
                for batch, name, class_name in recorder.unconfirmed_calls()
            ][:64]
        else:
            return
        module = module_of(error, model)
        error._nanwatch_noted = True  # type: ignore[attr-defined]
        if hasattr(error, "add_note"):  # from Python 3.11 on
            where = f" in {module}" if module else ""
            shown = [f"{title}:", *(f"  {line}" for line in lines[:_MOST])] if lines else []
            error.add_note("\n".join(map(visible, [f"nanwatch: {kind}{where}.", *shown])))
        if (box := process_box()) is not None:
            box.note(kind, error=str(error)[:500], module=module, **{title: lines})


def _largest_tensors() -> list[str]:
    sizes: defaultdict[str, list[int]] = defaultdict(list)
    seen: set[int] = set()
    for x in _extension.instances_of(Tensor):
        if type(x) not in (Tensor, nn.Parameter):  # a subclass may run the user's code
            continue
        with suppressing("a tensor could not be counted"):
            storage = x.untyped_storage()
            if storage.nbytes() >= _LEAST_BYTES and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                kind = f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)} on {x.device}"
                sizes[kind].append(storage.nbytes())
    largest = sorted(sizes.items(), key=lambda item: sum(item[1]), reverse=True)[:_MOST]
    return [f"{sum(each) / 2**20:9,.1f} MiB  {len(each)} x {kind}" for kind, each in largest]


def module_of(error: BaseException, model: nn.Module | None) -> str:
    """Return the innermost module whose code the error came from, "" where it is none of the model's."""
    names = {} if model is None else {id(module): name for module, name in module_names(model).items()}
    innermost, place = "", error.__traceback__
    while place is not None:
        owner = place.tb_frame.f_locals.get("self")
        if id(owner) in names:
            innermost = f"{module_name(names[id(owner)])} ({type(owner).__name__})"
        place = place.tb_next
    return innermost
