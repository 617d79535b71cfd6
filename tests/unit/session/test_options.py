"""The options of watch and the notes they lead to: when to act, what is meant, what is switched off."""

import argparse
import inspect
import re
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.cli.run import run_parser
from nanwatch.records.record import Note
from nanwatch.report.report import Report
from nanwatch.session.api import GIVEN, OPTIONS, TEXTS, VARIABLE, make_options
from nanwatch.session.kinds import Audit, Trace, flag, flag_or_none, to_sinks
from nanwatch.sinks.sink import Sink
from support.toys import Scale, fault_of, mlp, names
from support.watching import watch

INF = float("inf")


def test_pause_leaves_batches_out_and_resume_goes_on() -> None:
    """Calls made while paused are neither counted nor looked at, non-finite ones too; after stop() nothing resumes."""
    model = nn.Sequential(Scale())
    with watch(model) as w:
        model(torch.ones(1))
        w.pause()
        model(torch.full((1,), INF))
        w.resume()
        model(torch.ones(1))
        assert names(w) == [(0, "0"), (0, ""), (1, "0"), (1, "")]
    w.resume()
    model(torch.full((1,), INF))
    assert w.batch == 1


@pytest.mark.parametrize(("word", "watches"), [("0", False), ("1", True)])
def test_nanwatch_0_is_off(monkeypatch: pytest.MonkeyPatch, word: str, watches: bool) -> None:
    monkeypatch.setenv("NANWATCH", word)
    model = nn.Sequential(Scale(INF))
    with watch(model, on_nonfinite="record", gradients=True, audit=1) as w:
        model(torch.ones(1))
        w.pause()
        w.resume()
    assert (w.batch is not None, bool(w.frames), w.report().finding is not None) == (watches,) * 3


def test_acting_at_the_batch_gives_the_report_of_acting_at_the_module() -> None:
    reports: dict[str, Report] = {}
    ends: dict[str, list[str]] = {}
    for check in ("module", "batch"):
        model = mlp()
        model[0].weight.data.fill_(3e38)
        with watch(model, act_at=check) as w:
            reports[check] = fault_of(model, torch.ones(2, 3))
            ends[check] = [name for _, name in names(w)]
    assert reports["module"].to_json() == reports["batch"].to_json()
    assert ends["batch"] == ["0", "1", "2", ""]
    assert ends["module"] == ends["batch"][: len(ends["module"])] != ends["batch"]


@pytest.mark.parametrize("allow", ["inf:0", ["inf:9*", "inf:?"]])
def test_allowed_infinities_are_noted_and_no_fault(allow: Any) -> None:
    """In a module that may hold infinities they are "allowed", also where the tensor is handed on unchanged."""
    model = nn.Sequential(*[Scale() for _ in range(10)])
    model[0].factor = INF
    with watch(model, allow=allow, on_nonfinite="record") as w:
        model(torch.ones(1))
    assert (w.frames[0].records[1].note, w.frames[0].records[1].isfinite) == (Note("allowed"), False)
    finding = w.report().finding
    assert (finding and (finding.module, finding.label)) == (("1", "output") if allow == "inf:0" else None)
    with watch(model, allow="inf:*"):  # a nan among infinities is meant by nobody
        assert fault_of(model, torch.tensor([INF, float("nan")])).frames[-1].fault is not None


def test_signature_fields_flags_and_page_agree() -> None:
    """`watch`, its docstring, `Options`, `nanwatch run` and docs/options.md have the same options, each with a text."""
    signature = inspect.signature(nanwatch.watch).parameters
    assert list(OPTIONS) == [name for name, option in signature.items() if option.kind is option.KEYWORD_ONLY]
    assert signature["unknown"].annotation == "NoReturn"  # a type checker then refuses every other name
    assert vars(make_options({name: signature[name].default for name in OPTIONS})) == vars(make_options({}))
    described = inspect.getdoc(nanwatch.watch).partition("Args:")[2].partition("\n\n")[0]  # type: ignore[union-attr]
    assert re.findall(r"^    (\w+): ", described, re.MULTILINE) == ["model", *OPTIONS]
    assert (TEXTS["every"], TEXTS["replicas"][-3:]) == ("read only every n-th batch", "bit")
    flags = {action.dest: action.default for action in run_parser()._actions if action.dest in OPTIONS}
    assert set(flags.values()) == {argparse.SUPPRESS}
    assert OPTIONS.keys() - flags.keys() == {"optimizer"}
    page = runpy.run_path(str(Path(nanwatch.__file__).parents[2] / "docs" / "make_options.py"))
    assert page["PLACE"].read_text(encoding="utf-8") == page["page"](), "run python docs/make_options.py"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("read=outputs,weights", ("weights", "outputs")),
        ("gradients=true", True),
        ("modules=0,0.*", ("0", "0.*")),
        ("allow=inf:*.mask,nan:labels", ("inf:*.mask", "nan:labels")),
        ("on_nonfinite=warn", "warn"),
        ("rerun=false", False),
        ("audit=1", Audit(1)),
        ("audit=false", None),
        ("audit=7,frozen=0.*+1", Audit(7, frozen=("0.*", "1"))),
        ("replicas=true", 100),
    ],
)
def test_an_option_means_the_same_everywhere(monkeypatch: pytest.MonkeyPatch, text: str, value: Any) -> None:
    """On the command line, in NANWATCH_OPTIONS, which goes before the code, and in code."""
    name, _, words = text.partition("=")
    dashed = name.replace("_", "-")
    flags = [f"--{dashed}", words]
    if OPTIONS[name].metadata["kind"] in (flag, flag_or_none):
        flags = [f"--{dashed}" if words == "true" else f"--no-{dashed}"]
    parsed = vars(run_parser().parse_args([*flags, "train.py"]))[name]
    assert vars(make_options({name: parsed}))[name] == value
    assert vars(make_options({name: value}))[name] == value
    monkeypatch.setenv(VARIABLE, text)
    assert vars(make_options({name: GIVEN[name]}))[name] == value


def test_arguments_of_a_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The environment says them behind the path; the path is that of the folder in which they were said."""
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, "output_dir=a spikes=1 trace=run.parquet,counts,sketches=10,batches=0+20")
    options = make_options({})
    assert options.trace == Trace(tmp_path / "run.parquet", counts=True, sketches=10, batches=(0, 20))
    settings = options.recorder_settings()
    assert (settings.counts, settings.fingerprints, settings.sketches) == (True, False, 10)
    assert (set(settings.traced), settings.gradients, settings.black_box) == ({0, 20}, True, True)
    with pytest.raises(ValueError, match="batches of the Trace has 20, and every=7"):
        make_options({"every": 7})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gradients", "'gradients' should be option=value, such as gradients=true"),
        ("gradient=true", "no option 'gradient'; close names: gradients"),
        ("audit=x", "audit should be a nanwatch.Audit, True, False or a whole number of at least 0, got 'x'"),
        ("every=two", "every should be a whole number of at least 1, got 'two'"),
        ("trace=a.parquet,count", "'a.parquet,count' is not understood: .*; accepted are batches, counts,"),
        ("optimizer=mine", "optimizer should be a torch.optim.Optimizer or None, got str"),
        ("allow=mask", "allow should be inf:MODULE or nan:MODULE, such as 'inf:mask.', .* got 'mask'"),
        ("modules=", "modules has an empty pattern; '\\(root\\)' is the model itself"),
        ("modules='a", "No closing quotation"),
    ],
)
def test_wrong_words_are_refused(monkeypatch: pytest.MonkeyPatch, text: str, message: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(ValueError, match=f"NANWATCH_OPTIONS=.*{message}"):
        make_options({})


def test_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in (("ACT_AT", "batch"), ("PEER_TIMEOUT", "3"), ("STALL_TIMEOUT", "0.5")):
        monkeypatch.setenv(f"NANWATCH_{variable}", value)
    options = make_options({})
    assert (options.act_at, options.peer_timeout, options.stall_timeout) == ("batch", 3.0, 0.5)
    seconds = "a number of seconds of at least 0"
    for variable, value, words in (("_PEER_TIMEOUT", "soon", seconds), ("", "off", "0 or 1")):
        monkeypatch.setenv(f"NANWATCH{variable}", value)
        with pytest.raises(ValueError, match=f"NANWATCH{variable} should be {words}, got '{value}'"):
            make_options({})


@pytest.mark.parametrize("option", ["output_dir", "trace", "sinks"])
@pytest.mark.parametrize("place", ["file/inside", "/proc/nanwatch/inside"])
def test_a_place_where_nothing_can_be_written_is_refused(tmp_path: Path, option: str, place: str) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / place
    with pytest.raises(ValueError, match=rf"{option} is '{path}', and nothing can be written in"):
        watch(nn.ReLU(), **{option: path})
    assert [written.name for written in tmp_path.iterdir()] == ["file"]


def test_a_place_is_left_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No folder is made before there is something to write. No shell expands a tilde in the environment."""
    monkeypatch.setenv("HOME", str(tmp_path))
    assert make_options({"output_dir": "~/out"}).output_dir == tmp_path / "out"
    watch(nn.ReLU(), output_dir=tmp_path / "a" / "b", black_box=False).stop()
    assert not list(tmp_path.iterdir())


def test_one_sink_or_several_of_any_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects stay as they are; both spellings of a folder for TensorBoard are its path, which no `chdir` changes."""
    monkeypatch.chdir(tmp_path)
    sink, run = Sink(), SimpleNamespace(log=print, define_metric=print)
    writer = SimpleNamespace(add_scalar=print, add_text=print)
    assert (to_sinks("sinks", sink), to_sinks("sinks", ())) == ((sink,), ())
    assert to_sinks("sinks", [sink, run, writer, print]) == (sink, run, writer, print)
    folders = (tmp_path / "a", tmp_path / "b", tmp_path / "runs" / "nanwatch")
    assert to_sinks("sinks", ["wandb", "tensorboard:a", Path("b"), "tensorboard"]) == ("wandb", *folders)
    assert to_sinks("sinks", "wandb,tensorboard:a") == ("wandb", folders[0])
