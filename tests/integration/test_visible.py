"""Names, labels and notes of strangers in every form that people read: nothing of them reaches a terminal raw."""

from __future__ import annotations

import contextlib
import io
import json
import unicodedata
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import debug_utils as oracle

import nanwatch
from nanwatch import __main__ as command
from nanwatch.capsule.files import CapsuleError, blaming
from nanwatch.distributed.merge import Digest
from nanwatch.distributed.merge_pages import merged_text
from nanwatch.integrations import debug
from nanwatch.monitoring.batch_summary import BatchSummary
from nanwatch.monitoring.log_sinks import batch_entry, nonfinite_entry
from nanwatch.records.note import Note
from nanwatch.records.record import Frame, Record
from nanwatch.report import text
from nanwatch.report.finding import Cure, Origin, RankObservation
from nanwatch.report.report import NonFiniteError, Report
from nanwatch.trace.trace import unreadable
from nanwatch.util.place import Place
from nanwatch.util.visible import close_names, spell, visible
from support.html_page import Page
from support.merges import merged_of
from support.sightings import finding

ORDINARY = ["größe", "层.注意力", "слой", "كتلة", "שכבה", "étage 2", "block.0", "🔥", "a_b-c/d", "\\x1b"]
# Clears a screen, writes over a line, forges one, colours, turns text around, ends a title, is half a character.
HOSTILE = [
    "\x1b[2J",
    "\r",
    "\n",
    "\x1b[31m",
    "\u202e",
    "\x9b1m",
    "\x1b]0;x\x07",
    "\ud800",
    "\u2028",
    "\x00",
    "\u200f",
]
SOME = st.sampled_from(HOSTILE)
HIDDEN = st.characters(categories=["Cc", "Cf", "Cs", "Zl", "Zp"])
NASTY = st.lists(SOME | HIDDEN | st.sampled_from("aé层. "), min_size=1, max_size=12).map("".join)


def spelt(name: str) -> str:
    """The name as Python's repr spells each character that cannot be seen."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in name)


def assert_safe(shown: str, lines: int | None = None) -> None:
    """Nothing in it moves a cursor or hides; it has as many lines as with harmless names."""
    for one in shown.replace("\n", ""):
        assert unicodedata.category(one) not in ("Cc", "Cf", "Cs", "Zl", "Zp"), repr(one)
    if lines is not None:
        assert shown.count("\n") + 1 == lines


@given(st.text())
def test_only_what_cannot_be_seen_is_spelt(given_: str) -> None:
    """Each character by itself, as repr has it; a second time changes nothing."""
    assert visible(given_) == spelt(given_)
    assert visible(visible(given_)) == visible(given_)


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_names_stay_as_they_are(name: str) -> None:
    """Letters of any script, symbols and a backslash."""
    assert visible(name) == name
    assert text.frame_line(name, name) == f"{' ' * 17} {name} {name}"


def named(name: str) -> Report:
    """A report with this in every field that holds words."""
    records = (
        Record(
            f"weight{name}",
            "weight",
            (2,),
            "float32",
            0.5,
            1.0,
            True,
            None,
            Note("skipped_step", f"note{name}"),
        ),
        Record(f"input{name}", "input", None, "", None, None, None, None, Note("not_checked", name)),
        Record(f"output{name}", "output", (2,), f"float16{name}", float("nan"), float("nan"), False, None),
    )
    found = replace(
        finding("produced", 3),
        module=f"encoder{name}",
        class_name=f"Class{name}",
        label=f"output{name}",
        source_module=f"source{name}",
        extent=f"row{name}",
        operation=f"aten.log{name}",
        place=Place(f"train{name}.py", 3),
        cures=(Cure(f"scale{name}", True, 3.0),),
        operands=(Record(f"self{name}", "input", (2,), f"float32{name}", 0.5, 1.0, True, None),),
        remarks=(f"remark{name}",),
        files=(f"out{name}/report.txt",),
    )
    frame = Frame(3, f"encoder{name}", f"Class{name}", records)
    return Report((frame,), found, 3, parameter_mesh=(f"dp{name}=1 of 4",))


def forms(report: Report) -> list[str]:
    """Every text that is made of a report, whatever the place where it goes."""
    assert report.finding is not None
    first = RankObservation.of(report.finding, 0, 0, None, "")
    error = NonFiniteError(report, Origin(first, 1, 1, 2, 2))
    log = BatchSummary(3)
    name = report.frames[0].name
    log.add(Frame(3, name, "M", (Record(f"output{name}", "output", (2,), "float16", 0.0, 1.0, True, None),)))
    entry = batch_entry(log, [name])
    digests = [Digest(rank, replace(report.finding, rank=rank), {name: 2.0}, {}) for rank in (0, 1)]
    return [
        report.to_text(),
        str(report),
        str(error),
        text.summary(report.finding),
        "\n".join(text.frame_lines(report.frames[0])),
        close_names(f"encoder{name}", [name]),
        merged_text(merged_of(digests)),
        *nonfinite_entry(report.finding).texts.values(),
        *entry.texts.values(),
        *entry.scalars,
        spell(ValueError(name)),
        refused_capsule(name),
        str(unreadable(name)),
    ]


def refused_capsule(reason: str) -> str:
    with pytest.raises(CapsuleError) as caught, blaming(Path("capsule.json")):
        raise ValueError(reason)
    return str(caught.value)


HARMLESS = [len(one.splitlines()) for one in forms(named("x"))]


@given(NASTY)
@settings(max_examples=60)
def test_every_text_form_is_safe(name: str) -> None:
    """In whatever field it stands; and the structure and its JSON have it as it was."""
    report = named(name)
    for shown, lines in zip(forms(report), HARMLESS, strict=True):
        # An error shows the first line of its text alone.
        assert_safe(shown, lines)
    assert spelt(name) in report.to_text()
    assert Report.from_json(report.to_json()).to_json() == report.to_json()
    assert report.to_json().isascii()


@given(NASTY)
@settings(max_examples=20)
def test_a_page_shows_no_hidden_character(name: str) -> None:
    """Neither in its markup nor in what its script draws."""
    document = named(name).to_html()
    page = Page(document)
    assert spelt(f"encoder{name}") in page.data["frames"][0][1]
    assert_safe(page.text.replace("\r", ""))
    assert_safe(json.dumps(page.data, ensure_ascii=False))


@given(NASTY)
def test_an_error_quotes_a_strangers_file_safely(name: str) -> None:
    """An error about a report or a capsule is safe to print when Python code raised it."""
    document = json.loads(named("x").to_json())
    document["finding"]["spreads"] = [
        {"label": name, "dtype": name, "first": 0, "counts": [1]}
        | dict.fromkeys(("num_zero", "num_nan", "num_posinf", "num_neginf"), 0)
    ]
    with pytest.raises(ValueError, match="not a nanwatch report") as error:
        Report.from_json(json.dumps(document))
    assert_safe(str(error.value), 1)
    with pytest.raises(CapsuleError) as refused, blaming(Path("x")):
        raise ValueError(name)
    assert_safe(str(refused.value), 1)


class Overflows(nn.Module):
    """Makes an inf."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * 1e30).half()


def model_of(name: str) -> nn.Module:
    """A model whose module, parameter and class have this in their names."""
    kind = type(f"Overflows{name}".translate({0: None, 0xD800: None}), (Overflows,), {})  # which types refuse
    part = kind()
    part.register_parameter(f"weight{name}", nn.Parameter(torch.ones(1)))
    model = nn.Sequential()
    model.add_module(f"layer{name}".replace(".", ""), part)
    return model


@pytest.mark.usefixtures("each_recorder")
@pytest.mark.parametrize("action", ["raise", "warn"])
def test_a_watched_model_tells_in_safe_words(tmp_path: Path, action: str) -> None:
    """All that a failing run prints, warns of and writes to report.txt, with every hostile name at once."""
    model = model_of("".join(HOSTILE))
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        warnings.catch_warnings(record=True) as warned,
        contextlib.suppress(NonFiniteError) if action == "raise" else contextlib.nullcontext(),
        nanwatch.watch(
            model,
            on_nonfinite=action,  # type: ignore[arg-type]
            output_dir=tmp_path,
            trace_batches=(0,),
        ) as watch,
    ):
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.ones(2))
    report = watch.report()
    assert report.finding is not None
    assert "\x1b" in report.finding.module
    printed, written = out.getvalue(), (tmp_path / "batch-0" / "report.txt").read_bytes().decode()
    for shown in (printed, written):
        assert_safe(shown)
        assert spelt("layer" + "".join(HOSTILE).replace(".", "")) in shown
    for one in warned:
        assert_safe(str(one.message), 1)


def test_the_drop_in_prints_ordinary_names_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """With ordinary names of any script, stdout is that of transformers' class, byte for byte."""
    for name in ["größe", "层", "שכבה", "🔥"]:
        printed = []
        for made in (debug.DebugUnderflowOverflow, oracle.DebugUnderflowOverflow):
            model = model_of(name)
            made(model)
            with pytest.raises(ValueError, match=r"nan|inf"):
                model(torch.ones(2))
            printed.append(capsys.readouterr().out)
        assert printed[0] == printed[1]
        assert name in printed[0]


@pytest.mark.parametrize("name", HOSTILE, ids=repr)
@pytest.mark.parametrize("arguments", [("show",), ("merge",), ("show", "--html"), ("merge", "--html")])
def test_a_command_shows_a_strangers_report_safely(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, arguments: tuple[str, ...]
) -> None:
    """Printed in as many lines as a harmless one, with the documented exit status, a lone surrogate too."""
    pages: list[Any] = [] if len(arguments) == 1 else [tmp_path / "page.html"]
    lines = []
    for one in ("x", name):
        path = tmp_path / "report.json"
        path.write_text(named(one).to_json())
        assert command.main([*arguments, *map(str, pages), str(path)]) == (arguments[0] == "merge")
        printed = capsys.readouterr()
        assert printed.err == ""
        assert_safe(printed.out)
        lines.append(printed.out.count("\n"))
    assert lines[0] == lines[1]
    for page in pages:
        page.read_bytes().decode("utf-8")


@pytest.mark.parametrize("name", [one for one in HOSTILE if one not in ("\x00", "\ud800")], ids=repr)
def test_a_command_names_a_file_safely(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The error about a missing file is safe although the name would forge a line."""
    for arguments in (
        ("show",),
        ("merge",),
        ("diff", "."),
        ("formats",),
        ("replay", "--model", "torch.nn:ReLU"),
    ):
        if arguments[0] in ("diff", "formats", "show"):
            pytest.importorskip("pyarrow")
        assert command.main([*arguments, f"missing{name}"]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert_safe(printed.err.removesuffix("\n"), 1)


@pytest.mark.parametrize("name", HOSTILE, ids=repr)
def test_a_trace_is_shown_safely(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """By `show`, `formats` and `diff`, of a run whose modules had such names."""
    pytest.importorskip("pyarrow")
    paths = []
    for factor in (1.0, 3.0):
        model = nn.Sequential()
        model.add_module(f"layer{name}", nn.Linear(2, 2))
        with torch.no_grad():
            model[0].weight.fill_(factor)
        paths.append(str(tmp_path / f"{factor}.parquet"))
        with nanwatch.watch(model, trace=paths[-1]):
            model(torch.ones(2))
    page = tmp_path / "page.html"
    for arguments, status in (
        (("show", paths[0]), 0),
        (("formats", paths[0]), 0),
        (("top", paths[0], "--once"), 0),
        (("show", paths[0], "--html", str(tmp_path / "run.html")), 0),
        (("diff", *paths), 1),
        (("diff", *paths, "--html", str(page)), 1),
    ):
        assert command.main(list(arguments)) == status
        printed = capsys.readouterr()
        assert printed.err == ""
        assert_safe(printed.out)
        assert (spelt(f"layer{name}") in printed.out) == ("run.html" not in arguments[-1])
    for one in (page, tmp_path / "run.html"):
        assert_safe(Page(one.read_text(encoding="utf-8")).text.replace("\r", ""))
