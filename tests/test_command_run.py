"""`nanwatch run`: unchanged scripts in a process of their own, their stdout, exit status and report."""

from __future__ import annotations

import inspect
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import nanwatch
from first_fault import first_fault
from nanwatch import __main__ as command
from nanwatch import _command_run

SCRIPTS = Path(__file__).parent / "scripts"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(Path(nanwatch.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
HF = [
    "--use_cpu",
    "--bf16",
    "--optim",
    "sgd",
    "--max_grad_norm",
    "0",
    "--max_steps",
    "8",
    "--report_to",
    "none",
]
HF += ["--save_strategy", "no", "--disable_tqdm", "true", "--output_dir", "out"]


def python(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", *arguments],
        env=ENVIRONMENT | environment, cwd=cwd, capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def run(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "nanwatch", "run", *arguments, cwd=cwd, **environment)


def script(folder: Path, body: str, name: str = "script.py") -> str:
    """A script that begins with a model `net` and an optimizer."""
    head = "import sys, torch\nfrom torch import nn\nnet = nn.Sequential(nn.Linear(2, 2))\nx = torch.ones(1, 2)\n"
    (folder / name).write_text(head + body)
    return name


UNMODIFIED = [
    pytest.param("plain_loop.py", ["--lr", "3"], ["--lr", "0.01"], "Net", id="plain-fp32"),
    pytest.param("plain_loop.py", ["--lr", "3", "--dtype", "bfloat16"], ["--lr", "0.01"], "Net", id="plain-bf16"),
    pytest.param(
        "trainer_script.py", [*HF, "--learning_rate", "1000"], [*HF, "--learning_rate", "1e-3"], "GPT2LMHeadModel",
        id="trainer", marks=pytest.mark.slow,
    ),
    pytest.param(
        "lightning_script.py", ["1e3", "bf16-mixed"], ["0.01", "bf16-mixed"], "LitModel",
        id="lightning", marks=pytest.mark.slow,
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "bad", "good", "model"), UNMODIFIED)
def test_an_unchanged_script(name, bad, good, model, tmp_path):
    """The overflow ends it with status 3, report and files; a good run has the script's own status and stdout."""
    path = str(SCRIPTS / name)
    done = run("--json", "report.json", "--output-dir", "found", path, *bad, cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    report = nanwatch.Report.from_json((tmp_path / "report.json").read_text())
    finding = report.finding
    assert finding is not None
    assert (finding.label, finding.origin) == ("output", "produced")
    assert finding.operation is not None
    assert f"What:  {finding.value} first seen in `output` of {finding.module}" in done.stderr
    assert f"of {model}: {finding.value} first seen" in done.stderr
    assert "runpy" not in done.stderr
    assert not any(line.startswith(("trained:", "done")) for line in done.stdout.splitlines())
    assert "Detected" not in done.stdout
    assert {file.name for file in (tmp_path / "found" / f"batch-{finding.batch}").iterdir()} >= {
        "report.txt", "report.json",
    }  # fmt: skip

    watched, plain = run(path, *good, cwd=tmp_path), python(path, *good, cwd=tmp_path)
    assert watched.returncode == plain.returncode == 0, watched.stderr
    # The Trainer prints how long it took.
    timeless = [
        [line for line in one.stdout.splitlines() if "runtime" not in line] for one in (watched, plain)
    ]
    assert timeless[0] == timeless[1]
    assert f"of {model}: all that was read is finite" in watched.stderr


def test_the_module_is_the_one_that_hooks_find(tmp_path, monkeypatch):
    """The finding under `nanwatch run` is what plain hooks see first in the same training."""
    found, path = tmp_path / "report.json", str(SCRIPTS / "plain_loop.py")
    assert command.main(["run", "--json", str(found), path, "--lr", "3"]) == 3
    scope = runpy.run_path(path)
    torch.manual_seed(0)
    torch.randn(64, 4)  # the data, which the script makes before the model
    model = scope["Net"](8)
    monkeypatch.setattr(sys, "argv", ["plain_loop.py", "--lr", "3"])
    monkeypatch.setitem(scope["main"].__globals__, "Net", lambda hidden: model)
    finding = nanwatch.Report.from_json(found.read_text()).finding
    assert finding is not None
    assert finding.module == first_fault(model, scope["main"])


@pytest.mark.slow
def test_the_script_sees_what_it_would_see(tmp_path):
    """sys.argv, __name__, __file__, sys.path[0] and __main__ are those of `python SCRIPT` and `python -m MODULE`."""
    body = "import os\nprint(sys.argv, __name__, os.path.realpath(__file__), sys.path[0])\n"
    body += "print(sys.modules['__main__'].x is x)\n"
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    script(tmp_path, body)
    script(tmp_path / "package", body, "mod.py")
    script(tmp_path / "package", body, "__main__.py")
    for arguments in (
        ["script.py"],
        [str(tmp_path / "script.py")],
        ["package/mod.py"],
        ["-m", "package.mod"],
        ["-m", "package"],
    ):
        arguments = [*arguments, "--every", "x", "-m"]
        watched, plain = run(*arguments, cwd=tmp_path), python(*arguments, cwd=tmp_path)
        assert watched.stdout == plain.stdout
        assert plain.stdout
        assert watched.returncode == 0, watched.stderr
    # A folder is run by its __main__.py, through runpy, which makes the paths its own way.
    assert run("package", "1", cwd=tmp_path).stdout.startswith("['package', '1'] __main__")


@pytest.mark.parametrize(
    "body",
    [
        "net(x); sys.exit(7)", "sys.exit('words')", "sys.exit()", "net(x); raise RuntimeError('its own')", "1 +",
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)", "raise KeyboardInterrupt",
    ],
)  # fmt: skip
def test_the_exit_is_the_scripts_own(body, tmp_path):
    """Exit status and the last lines of stderr are those of the script, however it ends."""
    name = script(tmp_path, body)
    watched, plain = run(name, cwd=tmp_path), python(name, cwd=tmp_path)
    assert watched.returncode == plain.returncode
    if plain.stderr.strip():
        assert plain.stderr.strip().splitlines()[-1] in watched.stderr
    assert "_command_run.py" not in watched.stderr or "KeyboardInterrupt" in watched.stderr


def test_an_exception_hook_of_the_script_is_called(tmp_path):
    """A script that shows its exceptions itself still does, and the report is not lost."""
    body = "sys.excepthook = lambda kind, error, place: print('mine', kind.__name__)\n"
    body += "net[0].weight.data.fill_(3e38)\nnet(x)\n"
    done = run(script(tmp_path, body), cwd=tmp_path)
    assert done.returncode == 3
    assert done.stdout == "mine NonFiniteError\n"
    assert "inf first seen in `output` of 0 (Linear)" in done.stderr


def test_warnings_and_records_leave_the_status_alone(tmp_path):
    """With --on-nonfinite warn or record, or an error that the script catches, its own status counts."""
    body = "net[0].weight.data.fill_(3e38)\nnet(x)\nprint('end')\n"
    caught = "net[0].weight.data.fill_(3e38)\ntry: net(x)\nexcept ValueError: sys.exit(5)\n"
    for options, text, status in (
        (["--on-nonfinite", "warn"], body, 0),
        (["--on-nonfinite", "record"], body, 0),
        ([], caught, 5),
    ):
        done = run(*options, script(tmp_path, text), cwd=tmp_path)
        assert done.returncode == status
        assert "What:  inf first seen in `output` of 0 (Linear)" in done.stderr
        assert done.stdout == ("end\n" if text is body else "")


def test_nothing_to_watch_is_said(tmp_path):
    """An evaluation trains nothing: stderr says so and how to name the model; named, it is watched."""
    name = script(
        tmp_path, "net.eval()\nfor p in net.parameters(): p.requires_grad_(False)\nnet(x)\nnet(x)\n"
    )
    done = run("--json", "report.json", name, cwd=tmp_path)
    assert done.returncode == 0
    assert "nothing was watched" in done.stderr
    assert "Sequential" in done.stderr
    assert "--model" in done.stderr
    assert nanwatch.Report.from_json((tmp_path / "report.json").read_text()).frames == ()
    done = run("--model", "Seq*", name, cwd=tmp_path)
    assert "2 batches of Sequential: all that was read is finite" in done.stderr
    assert "NANWATCH=0" in run("--model", "Seq*", name, cwd=tmp_path, NANWATCH="0").stderr


def test_options_reach_the_watch(tmp_path):
    """Options of `watch` do under `run` what they do there."""
    name = script(tmp_path, "for _ in range(5): net(x)\nprint('end')\n")
    done = run("--abort-after-batch", "2", name, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "")
    assert "stopped after batch 2" in done.stderr
    done = run("--trace-batches", "1,3", name, cwd=tmp_path)
    assert done.stdout.count("*** Starting batch number=") == 2
    done = run(
        "--json", "report.json", "--max-frames", "3", "--no-weights", "--include", "0", name, cwd=tmp_path
    )
    frames = nanwatch.Report.from_json((tmp_path / "report.json").read_text()).frames
    assert [(frame.name, [record.role for record in frame.records]) for frame in frames] == [
        ("0", ["input", "output"])
    ] * 3
    done = run("--trace", "run.parquet", name, cwd=tmp_path)
    assert nanwatch.Trace.open(tmp_path / "run.parquet").batches == tuple(range(5)), done.stderr
    # A pattern that matches nothing costs the watch, not the run.
    done = run("--include", "encoder.*", name, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, "end\n")
    assert "Sequential is not watched: include pattern 'encoder.*' matches no module" in done.stderr


def test_two_models_are_two_watches(tmp_path):
    """Each of two models is watched by itself, and the report is of the one that failed."""
    body = "other = nn.Sequential(nn.Identity(), nn.Linear(2, 2))\nother[1].weight.data.fill_(3e38)\nnet(x)\nother(x)\n"
    done = run("--json", "report.json", script(tmp_path, body), cwd=tmp_path)
    assert done.returncode == 3
    finding = nanwatch.Report.from_json((tmp_path / "report.json").read_text()).finding
    assert finding is not None
    assert finding.module == "1"
    assert "1 batch of Sequential: all that was read is finite" in done.stderr


def test_bad_use(tmp_path, capsys):
    """Status 2 and one line on stderr, before the script runs."""
    name = script(tmp_path, "print('ran')\n")
    for arguments, expected in [
        (["nosuch.py"], "there is no script 'nosuch.py'"),
        (["--every", "0", str(tmp_path / name)], "every should be at least 1, got 0"),
        (["--json", str(tmp_path / "no" / "file.json"), str(tmp_path / name)], "No such file"),
        (["--output-dir", str(tmp_path / name), str(tmp_path / name)], "output_dir should be a folder"),
    ]:
        assert command.main(["run", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert expected in err
    for arguments in ([], ["--evry", "2", "x.py"], ["--trace-batches", "one", "x.py"]):
        with pytest.raises(SystemExit) as stopped:
            command.main(["run", *arguments])
        assert stopped.value.code == 2
    with pytest.raises(SystemExit) as stopped:
        command.main(["run", "--help"])
    assert stopped.value.code == 0
    assert "examples:" in capsys.readouterr().out


def test_every_option_of_watch_has_a_flag():
    """An option that `watch` has and `run` has not is noticed here; objects have no spelling on a command line."""
    flags = {action.dest for action in _command_run._parser()._actions}
    options = {
        name
        for name, one in inspect.signature(nanwatch.watch).parameters.items()
        if one.kind is one.KEYWORD_ONLY and not name.startswith("_")
    }
    assert options - flags == {"enabled", "optimizer", "scaler"}


def test_other_processes_of_torchrun_have_files_of_their_own(monkeypatch):
    """--json names one file; a rank other than 0 puts its number in."""
    assert _command_run._of_this_rank("a/report.json") == Path("a/report.json")
    monkeypatch.setenv("RANK", "3")
    assert _command_run._of_this_rank("a/report.json") == Path("a/report-rank-3.json")
