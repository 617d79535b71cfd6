"""A page taken apart by html.parser, and reports to make pages of."""

from html.parser import HTMLParser
from math import inf, isnan, nan
from typing import Any

from nanwatch.numerics.formats import TensorHealth
from nanwatch.records.record import Frame, Note, NoteKind, Record
from nanwatch.report.events import Departure, SpikeReport
from nanwatch.report.finding import find
from nanwatch.report.report import Report

SPIKE = SpikeReport(410, 0, (Departure("", "loss", 9.1, 2.4, 55.0),), "loss")
VOID = {"meta", "link", "input", "br"}

HOSTILE = '"></script><svg onload=alert(1)>\x1b[31m\n'


class Page(HTMLParser):
    """The elements of a document: `tags` as (name, attributes), `text` of the whole, `titles` in its pictures."""

    def __init__(self, document: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.unbalanced: list[str] = []
        self.words: list[str] = []
        self.headline: list[str] = []
        self.titles: list[str] = []
        self.style = ""
        self.feed(document)
        self.close()
        self.text = " ".join("".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("code", "b"):
            self.words.append(" ")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        inside = self.open[-1] if self.open else ""
        if inside == "style":
            self.style += data
        elif inside == "title" and "svg" in self.open:
            self.titles.append(data)
        else:
            self.words.append(data)
            if "h1" in self.open:
                self.headline.append(data)


def record(label: str, role: Any, abs_max: float = 1.0, abs_min: float = 0.5, **changes: Any) -> Record:
    """A float16 record of four elements; non-finite, with a health, when its abs_max is."""
    health = None
    if not (is_finite := abs_max < inf):
        counts = (int(isnan(abs_max)), int(abs_max == inf), 0, 0, 0, 4, (1, 0))
        health = TensorHealth(abs_min, abs_max, False, abs_min, 2.0, *counts)
        abs_min = nan if isnan(abs_max) else abs_min
    return Record(label, role, (2, 2), "float16", abs_min, abs_max, is_finite, health)._replace(**changes)


def unread(
    label: str, kind: NoteKind, text: str = "", shape: tuple[int, ...] | None = None, dtype: str = ""
) -> Record:
    """A record of an input without a range."""
    return Record(label, "input", shape, dtype, None, None, None, None, Note(kind, text))


def frame(name: str, *records: Record, batch: int = 0, class_name: str = "Linear") -> Frame:
    return Frame(batch, name, class_name, records)


def growing(*, hostile: str = "") -> Report:
    """Six layers whose output grows by a factor of eight until it overflows; `hostile` is put into every name."""
    frames = [
        Frame(0, "encoder" + hostile, "Embedding" + hostile, (record("output" + hostile, "output", 1.0),))
    ]
    unread_input = unread("input[1]", "not_checked", "meta" + hostile, (3,), "int64")
    for i in range(7):
        made = 8.0**i if i < 6 else inf
        records = (
            record("weight" + hostile, "weight", 0.75, 1e-6),
            record("input[0]" + hostile, "input", 8.0 ** max(i - 1, 0)),
            *((unread_input, unread("input[2]", "absent")) if i == 0 else ()),
            record("output" + hostile, "output", made, 0.0 if i % 2 else 0.5),
        )
        frames.append(Frame(1, f"encoder.block.{i}.wo{hostile}", "Linear" + hostile, records))
    return Report(tuple(frames), find(frames), 1)
