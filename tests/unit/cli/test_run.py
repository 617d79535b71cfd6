"""`nanwatch run`: unchanged scripts in a process of their own, their stdout, exit status and report."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import nanwatch
from nanwatch import __main__ as command
from support.processes import environment, forked

ENVIRONMENT = environment(OMP_NUM_THREADS="1")


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return forked("-W", "ignore", "-m", "nanwatch", "run", *arguments, cwd=cwd, env=ENVIRONMENT)


def both(*arguments: str, cwd: Path) -> tuple[subprocess.CompletedProcess[str], ...]:
    """Run a script with `nanwatch run` and with Python alone."""
    ways = ("-m", "nanwatch", "run"), ()
    return tuple(forked("-W", "ignore", *way, *arguments, cwd=cwd, env=ENVIRONMENT) for way in ways)


def script(folder: Path, body: str, name: str = "script.py") -> str:
    """A script that begins with a model `net` and an optimizer."""
    head = "import sys, torch\nfrom torch import nn\nnet = nn.Sequential(nn.Linear(2, 2))\nx = torch.ones(1, 2)\n"
    (folder / name).write_text(head + body)
    return name


# A script with a learning rate as its argument. The trainers of other packages are in thirdparty/test_trainer_hosts.py.
FITS = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))

torch.manual_seed(0)
data, model = torch.randn(64, 4), Net()
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
for _ in range(50):
    loss = nn.functional.mse_loss(model(data), data.sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("trained:", f"{loss:.3f}")
"""


def test_an_unchanged_script(tmp_path):
    """The overflow ends it with status 3, report and files; a good run has the script's own status and stdout."""
    name = script(tmp_path, FITS)
    done = run("--output-dir", "found", name, "3", cwd=tmp_path)
    assert done.returncode == 3, done.stderr
    (folder,) = tmp_path.glob("found/batch-*")
    finding = nanwatch.Report.from_json((folder / "report.json").read_text()).finding
    assert (finding.module, finding.label, finding.origin) == ("(loss)", "output", "received")
    assert finding.operation is not None
    assert f"What:  {finding.value} first seen in the loss (" in done.stderr
    assert f"of Net: {finding.value} first seen" in done.stderr
    assert "runpy" not in done.stderr
    assert done.stdout == ""
    assert (folder.name, (folder / "report.txt").exists()) == (f"batch-{finding.batch}", True)

    watched, plain = both(name, "0.01", cwd=tmp_path)
    assert watched.returncode == plain.returncode == 0, watched.stderr
    assert watched.stdout == plain.stdout != ""
    assert "of Net: all that was read is finite" in watched.stderr


def test_the_script_sees_what_it_would_see(tmp_path):
    """sys.argv, __name__, __file__, sys.path[0] and __main__ are those of `python SCRIPT` and `python -m MODULE`."""
    body = "import os, sys\nx = []\nprint(sys.argv, __name__, os.path.realpath(__file__), sys.path[0])\n"
    body += "print(sys.modules['__main__'].x is x)\n"
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    for name in ("script.py", "package/mod.py", "package/__main__.py"):
        (tmp_path / name).write_text(body)
    for arguments in (["script.py"], ["package/mod.py"], ["-m", "package"]):
        arguments = [*arguments, "--every", "x", "-m"]
        command = [sys.executable, *arguments]
        plain = subprocess.run(command, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True)
        watched = run(*arguments, cwd=tmp_path)
        assert watched.stdout == plain.stdout
        assert plain.stdout
        assert watched.returncode == 0, watched.stderr
    assert "there is no script 'package'" in run("package", cwd=tmp_path).stderr


@pytest.mark.parametrize(
    "body",
    [
        "net(x); sys.exit(7)",
        "import os, signal; os.kill(os.getpid(), signal.SIGINT)",
        "net(x); raise RuntimeError('its own')",
    ],
)
def test_the_exit_is_the_scripts_own(body, tmp_path):
    name = script(tmp_path, body)
    watched, plain = both(name, cwd=tmp_path)
    assert watched.returncode == plain.returncode
    if plain.stderr.strip():
        assert plain.stderr.strip().splitlines()[-1] in watched.stderr
    assert "cli/run.py" not in watched.stderr


PICKLED_LATE = """
import atexit, pickle, threading, time

class Net(nn.Module):
    def forward(self, x):
        return self.l(x)

def save(when):
    print(when, type(pickle.loads(pickle.dumps(model))) is Net)

model = Net()
model.l = net
model(x)
atexit.register(save, "atexit")
threading.Thread(target=lambda: (time.sleep(0.2), save("thread"))).start()
"""


def test_main_stays_until_the_process_ends(tmp_path):
    """A thread that still saves, and an atexit function, find the script's classes where pickle looks for them."""
    script(tmp_path, PICKLED_LATE)
    done = run("script.py", cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("thread True\natexit True\n", 0), done.stderr


@pytest.fixture(autouse=True)
def _plain_hook(monkeypatch):
    """Without the hooks that process groups of other tests have left in this process."""
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)


def test_in_a_process_group_the_report_is_shown_once(tmp_path, capsys):
    """torch.distributed's hook puts the rank before each line."""
    body = "import torch.distributed as dist\n"
    body += "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
    body += "dist.destroy_process_group()\nnet[0].weight.data.fill_(3e38)\nnet(x)\n"
    assert in_process(tmp_path, body) == 3
    err = capsys.readouterr().err
    assert err.count("By:") == 1
    assert err.startswith("[rank0]: ")


def in_process(tmp_path, body, *options):
    """The exit status of a script that is run in this process."""
    return command.main(["run", *options, str(tmp_path / script(tmp_path, body))])


def test_warnings_and_records_leave_the_status_alone(tmp_path, capsys):
    """With --on-nonfinite warn or record, or an error that the script catches, its own status counts."""
    body = "net[0].weight.data.fill_(3e38)\nnet(x)\nprint('end')\n"
    caught = "net[0].weight.data.fill_(3e38)\ntry: net(x)\nexcept ValueError: sys.exit(5)\n"
    with pytest.warns(RuntimeWarning, match="inf first seen"):
        assert in_process(tmp_path, body, "--on-nonfinite", "warn") == 0
    warned = capsys.readouterr()
    assert in_process(tmp_path, body, "--on-nonfinite", "record") == 0
    recorded = capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        in_process(tmp_path, caught)
    assert left.value.code == 5
    for (out, err), printed in ((warned, "end\n"), (recorded, "end\n"), (capsys.readouterr(), "")):
        assert "What:  inf first seen in `output` of 0 (Linear)" in err
        assert out == printed


def test_a_run_whose_watches_are_switched_off_says_so(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("NANWATCH", "0")
    assert in_process(tmp_path, "net(x)\n") == 0
    assert "NANWATCH=0" in capsys.readouterr().err


def test_a_teacher_and_its_student_are_watched(tmp_path, capsys):
    """Each by itself, trained or not. A pattern for the student is no mistake where the teacher comes first."""
    body = "net.eval().requires_grad_(False)\n"
    body += "student = nn.Sequential(nn.ReLU(), nn.ReLU(), nn.Linear(2, 2))\n"
    body += "for _ in range(2): student(net(x)).sum().backward()\n"
    line = "nanwatch run: 2 batches of Sequential: all that was read is finite"
    assert in_process(tmp_path, body) == 0
    assert capsys.readouterr().err.splitlines() == [line] * 2
    assert in_process(tmp_path, body, "--modules", "2") == 0
    refusal, *rest = capsys.readouterr().err.splitlines()
    assert refusal.startswith("nanwatch run: Sequential is not watched: modules pattern '2' matches no")
    assert rest == [line]
    assert in_process(tmp_path, "net.eval().requires_grad_(False)\nnet[0].weight.fill_(3e38)\nnet(x)\n") == 3


def test_options_reach_the_watch(tmp_path, capsys):
    """Options of `watch` do under `run` what they do there; the closing line names the trace."""
    body = "for _ in range(5): net(x)\n"
    trace = tmp_path / "run.parquet"
    options = "--read", "inputs,outputs", "--modules", "0"
    assert in_process(tmp_path, body, "--trace", str(trace), *options) == 0
    frames = nanwatch.Trace.open(trace).frames(4)
    rows = [(frame.name, [record.role for record in frame.records]) for frame in frames]
    assert rows == [("0", ["input", "output"])]
    assert f"all that was read is finite; trace: {trace}\n" in capsys.readouterr().err
    assert in_process(tmp_path, body, "--trace", str(trace)) == 0
    assert f"; trace: {tmp_path / 'run-1.parquet'}\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("mend", "expected"),
    [
        ("opt.zero_grad()", "skipped steps, as gradients were not finite: 3, the last: nan"),
        (
            "[p.grad.nan_to_num_() for p in net.parameters()]\n    opt.step()",
            "non-finite backwards whose steps took finite gradients: 3;",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_gradients_that_reached_no_weight_are_told_at_the_end(tmp_path, capsys, mend, expected):
    body = "opt = torch.optim.SGD(net.parameters(), 0.1)\nfor _ in range(3):\n    net.zero_grad()\n"
    body += f"    (net(x) * 0).sqrt().sum().backward()\n    {mend}\nnet(x).sum().backward()\n"
    assert in_process(tmp_path, body, "--gradients") == 0
    assert f"4 batches of Sequential: {expected}" in capsys.readouterr().err


def test_bad_use(tmp_path, capsys):
    """Status 2 and one line on stderr, before the script runs."""
    name = script(tmp_path, "print('ran')\n")
    for arguments, expected in [
        (["nosuch.py"], "there is no script 'nosuch.py'"),
        (["--every", "0", str(tmp_path / name)], "every should be at least 1, got 0"),
        (["-m", "nosuchmodule"], "No module named nosuchmodule"),
        (["--output-dir", str(tmp_path / name), str(tmp_path / name)], "nothing can be written in"),
    ]:
        assert command.main(["run", *arguments]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert expected in err
    for arguments in ([], ["--gradients=1", "x.py"]):
        with pytest.raises(SystemExit) as stopped:
            command.main(["run", *arguments])
        assert stopped.value.code == 2
        assert ("required: SCRIPT\n" in capsys.readouterr().err) == (not arguments)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--modules", "encoder.*"), "modules pattern 'encoder.*' matches no module"),
        (("--ignore-modules", "*"), "leave no module to watch"),
    ],
)
def test_what_matches_nothing_ends_the_run_at_the_first_call(tmp_path, capsys, options, expected):
    """Status 2 and a line that names the candidates, though the script catches exceptions."""
    body = "print('begins')\ntry: net(x)\nexcept Exception: pass\nprint('hours later')\n"
    assert in_process(tmp_path, body, *options) == 2
    out, err = capsys.readouterr()
    assert out == "begins\n"
    assert expected in err
    assert "Sequential, whose modules are 0" in err
    assert err.count("nanwatch run:") == 1


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("nn.MSELoss()(x, x)\n", "nothing was watched: no call of a module with weights or buffers was seen"),
        ("import nanwatch\nown = nanwatch.watch(net)\nnet(x)\n", "that the script watches itself"),
        ("torch.jit.trace(net, x)(x)\n", "3 batches of Sequential: all that was read is finite"),
        ("torch.jit.script(net)(x)\n", "RecursiveScriptModule is not watched: "),
        ("nets = [nn.Linear(2, 2) for _ in range(33)]\nfor net in nets: net(x)\n", "32 models were found;"),
    ],
)
def test_the_closing_lines_are_true(tmp_path, capsys, body, expected):
    assert in_process(tmp_path, body) == 0
    assert expected in capsys.readouterr().err


@pytest.mark.parametrize(
    "body",
    [
        "try: net(x)\nexcept ValueError as error: raise RuntimeError('training failed') from error\n",
        "import threading\none = threading.Thread(target=net, args=(x,))\none.start()\none.join()\n",
        "sys.excepthook = lambda *_: sys.exit(7)\nnet(x)\n",
    ],
)
def test_an_error_that_nobody_caught_is_status_3(tmp_path, capsys, body, monkeypatch):
    """Wrapped in another one, in a thread, or shown by a hook of the script's own."""
    monkeypatch.setattr(threading, "excepthook", threading.__excepthook__)
    assert in_process(tmp_path, "net[0].weight.data.fill_(3e38)\n" + body) == 3
    assert "What:  inf first seen in `output` of 0 (Linear)" in capsys.readouterr().err
    assert threading.excepthook is threading.__excepthook__


def test_a_script_that_changes_its_folder(tmp_path, monkeypatch):
    """Files are written where they were when the run began; a forked child reports nothing."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    body = "import os\nnet[0].weight.data.fill_(3e38)\nos.chdir('elsewhere')\n"
    body += "if (child := os.fork()) == 0:\n    sys.exit(0)\nassert os.waitpid(child, 0)[1] == 0\n"
    body += "net(x)\n"
    script(tmp_path, body)
    try:
        status = command.main(["run", "--output-dir", "found", "script.py"])
    except SystemExit:  # the child
        os._exit(0)
    assert status == 3
    assert (tmp_path / "found" / "batch-0" / "report.json").exists()
    assert not list((tmp_path / "elsewhere").iterdir())
