"""The bounded buffer of the latest frames."""

from __future__ import annotations

from collections import deque

from .frame import Frame, FrameRows


class Recorder:
    """Keeps the last `max_frames` frames as rows, and builds frames only for those who ask.

    Appending to a bounded deque is atomic under the interpreter lock, so calls from several threads may
    interleave but never corrupt it.
    """

    __slots__ = ("_rows",)

    def __init__(self, max_frames: int | None) -> None:
        self._rows: deque[FrameRows] = deque(maxlen=max_frames)

    def add(self, rows: FrameRows) -> None:
        """Append a frame; the oldest goes when the buffer is full."""
        self._rows.append(rows)

    def clear(self) -> None:
        """Forget every frame."""
        self._rows.clear()

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The frames kept, oldest first."""
        return tuple(rows.to_frame() for rows in tuple(self._rows))
