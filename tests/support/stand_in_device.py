"""A device that runs only when it is told, over the memory of the host: csrc/device/row_table.h through ctypes.

Whatever a tensor holds when its read is enqueued is what the read finds, as in a stream; the row is written when the
queue is run, or when somebody waits. So a test can show that nobody waited, that no row is used before it has come, and
what is left after an error that ends the device.
"""

import collections
import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nanwatch.numerics import _extension, _reference
from nanwatch.numerics.readable import is_plain, only_our_dispatch, unreadable
from support.cuda_emulation import FORMATS, DescribedTensor, Row

DTYPES = {number: dtype for dtype, number in FORMATS.items()}
CAPTURING = -4
BROKEN = 710
OLD_DRIVER = 35


_INT, _PLACE, _TENSORS = ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(DescribedTensor)
_OUT = ctypes.POINTER(_PLACE)
_KINDS: dict[str, Any] = {
    "device_of": ctypes.CFUNCTYPE(_INT, _PLACE),
    "stream": ctypes.CFUNCTYPE(_INT, _INT, _OUT, ctypes.POINTER(_INT)),
    "allocate": ctypes.CFUNCTYPE(_INT, _INT, ctypes.c_size_t, _OUT, _OUT),
    "observe": ctypes.CFUNCTYPE(_INT, _TENSORS, ctypes.c_int64, _PLACE, ctypes.c_uint64, _INT, _PLACE),
    "wait": ctypes.CFUNCTYPE(_INT, _INT, _PLACE),
    "cannot_run": ctypes.CFUNCTYPE(_INT, _INT),
    "error": ctypes.CFUNCTYPE(_PLACE, _INT),
}


# A watch may outlive its stand-in, and rows that it remembers lie there. Each block has 12 MB: a test process that
# kept one for each of its tests grew to 9 GB.
_BLOCKS: collections.deque[Any] = collections.deque()


def block_of(size: int) -> Any:
    """Memory that is not freed, and was not handed out the last 20 times; with garbage, as a slot is before its row."""
    is_spare = len(_BLOCKS) >= 20 and len(_BLOCKS[0]) == size
    block = _BLOCKS.popleft() if is_spare else (ctypes.c_char * size)()
    ctypes.memset(block, 0xA5, size)
    _BLOCKS.append(block)
    return block


class Backend(ctypes.Structure):
    """NanwatchBackend."""

    _fields_ = (("takes_host_memory", ctypes.c_int64), *_KINDS.items())


def tensor_at(described: DescribedTensor) -> Tensor:
    dtype = DTYPES[described.format]
    if described.numel == 0:
        return torch.empty(0, dtype=dtype)
    memory = bytearray(ctypes.string_at(described.data, described.numel * dtype.itemsize))
    return torch.frombuffer(memory, dtype=dtype)


def values_of(x: Tensor) -> tuple[list[float], bool]:
    """Return the row that the device writes of a run, and whether it had to read it more closely."""
    values = [*_reference.health(x).tolist(), float(may_be_mask(x))]
    if values[2] != 0 and not values[11]:
        return [*values[:3], *[float("nan")] * 9], False
    return values, True


def may_be_mask(x: Tensor) -> bool:
    """Zeros and -inf alone, or zeros and the lowest number of 16 bits and more."""
    if not x.dtype.is_floating_point:
        return False
    found = set(x.double().unique().tolist())
    lowest = [float("-inf")] + ([torch.finfo(x.dtype).min] if x.dtype.itemsize > 1 else [])
    return any(found == {0.0, low} for low in lowest)


def write_row(address: int, stamp: int, values: list[float], examined: bool) -> None:
    row = Row.from_address(address)
    row.values[:], row.examined, row.stamp = values, float(examined), stamp


@dataclass
class StandIn:
    """The device, and what was done with it."""

    place: Callable[[Tensor], int] = lambda x: 0  # the number of the tensor's device; -1: the host
    holds: bool = True  # else every operation runs at once
    stream: int = 1  # the current one, of every device
    capturing: bool = False
    broken: bool = False  # every call fails, and what is queued is never done
    fail_next: int = 0  # the next observe fails with this
    waits: int = 0
    launches: list[int] = field(default_factory=list)  # how many tensors each had
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._queue: list[tuple[tuple[int, int], Callable[[], None]]] = []
        self._texts: dict[int, Any] = {}
        self._lock = threading.RLock()

    # Called by tests

    def run(self, count: int | None = None) -> None:
        """Run so many of the queued operations, oldest first; all of them unless told."""
        with self._lock:
            for _ in range(len(self._queue) if count is None else count):
                if not self._queue or self.broken:
                    return
                self._queue.pop(0)[1]()

    # Called by the recorder

    def _device_of(self, address: int) -> int:
        x = _extension.C.tensor_at(address)
        if unreadable(x) or x.is_neg():
            return -1
        return self.place(x) if is_plain(x) and x.device.type == "cpu" else -1

    def _stream(self, device: int, stream: Any, capturing: Any) -> int:
        stream[0] = self.stream
        capturing[0] = int(self.capturing)
        return 0

    def _allocate(self, device: int, size: int, memory: Any, address: Any) -> int:
        block = block_of(size)
        memory[0] = address[0] = ctypes.addressof(block)
        return 0

    def _observe(self, tensors: Any, count: int, rows: int, first: int, device: int, stream: int) -> int:
        if self.broken:
            return BROKEN
        if self.fail_next:
            code, self.fail_next = self.fail_next, 0
            return code
        self.launches.append(count)
        assert not self.capturing, "an operation in a capture of the user's"
        for i in range(count):
            address, row = rows + i * ctypes.sizeof(Row), values_of(tensor_at(tensors[i]))
            self._enqueue((device, stream), functools.partial(write_row, address, first + i, *row))
        return 0

    def _enqueue(self, where: tuple[int, int], operation: Callable[[], None]) -> None:
        with self._lock:
            self._queue.append((where, operation))
            if not self.holds:
                self.run()

    def _wait(self, device: int, stream: int) -> int:
        if self.broken or self.capturing:
            return BROKEN if self.broken else CAPTURING
        self.waits += 1
        with self._lock:
            # Work of the device meanwhile: that of its stream.
            awaited = [operation for where, operation in self._queue if where == (device, stream)]
            self._queue = [entry for entry in self._queue if entry[0] != (device, stream)]
            for operation in awaited:
                operation()
        return 0

    def _cannot_run(self, error: int) -> int:
        return int(error == OLD_DRIVER)

    def _error(self, code: int) -> int:
        text = f"error {code} of the stand-in".encode()
        return ctypes.addressof(self._texts.setdefault(code, ctypes.create_string_buffer(text)))

    def table(self) -> Backend:
        """The functions; they live as long as the table."""

        def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
            @torch.compiler.disable  # as it is called in the middle of what is compiled
            def call(*arguments: Any) -> Any:
                try:
                    with only_our_dispatch(), torch.no_grad():
                        return function(*arguments)
                except BaseException as error:
                    self.errors.append(error)
                    return BROKEN

            return call

        functions = {name: kind(guarded(getattr(self, f"_{name}"))) for name, kind in _KINDS.items()}
        return Backend(takes_host_memory=1, **functions)


@contextlib.contextmanager
def stand_in(**settings: Any) -> Iterator[StandIn]:
    """The stand-in in the place of all devices, for the watches that begin inside."""
    device = StandIn(**settings)
    table = device.table()
    before = _extension.C.set_device_backend(ctypes.addressof(table))
    try:
        yield device
    finally:
        _extension.C.set_device_backend(before)
        _KEPT.append((device, table))
    assert not device.errors, device.errors


# A watch may outlive the block, and ask for its rows.
_KEPT: list[Any] = []
