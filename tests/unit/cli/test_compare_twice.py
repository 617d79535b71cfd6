"""`python -m nanwatch twice`: what a script does differently in processes of its own, exit status, bad use."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from nanwatch import __main__ as command
from nanwatch.cli import compare
from support.processes import forked

TRAINING = """
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
for x in data:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""

CALLS = """
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))
for x in data:
    model(x).square().mean().backward()
"""


class Script(NamedTuple):
    """Lines before the training, and what is found: tensor, words of the cause, and the cure."""

    lines: str
    tensor: str
    words: str
    cure: str


SCRIPTS = {
    "unseeded": Script("data = torch.ones(3, 2, 4)", "weight", "does not seed", "manual_seed(0)"),
    "set_order": Script(
        "torch.manual_seed(0)\nnames = {'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}\n"
        "data = torch.tensor([ord(one) / 100 for one in names]).reshape(1, 2, 4)",
        "input[0]",
        "or a set",
        "PYTHONHASHSEED=0",
    ),
    "loader": Script(
        "import os\ntorch.manual_seed(0)\nitems = torch.arange(80.0).reshape(20, 4)\n"
        "generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), 'little'))\n"
        "data = torch.utils.data.DataLoader(items, 2, shuffle=True, generator=generator)",
        "input[0]",
        "os.urandom()",
        "manual_seed(0)",
    ),
    "address": Script(
        "torch.manual_seed(0)\ndata = torch.ones(1, 2, 4) * (id(torch.nn) / 2**40)",
        "input[0]",
        "no change that was tried",
        "",
    ),
}

# An interpreter draws these when it starts.
OF_THE_INTERPRETER = {"set_order", "address"}


def run(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = command.main(["twice", *arguments])
    shown = capfd.readouterr()
    return status, shown.out, shown.err


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run scripts in processes that need not import torch, as 3 s of each run are its imports."""

    def start(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        return forked(*command[1:], env=env)

    # The interpreter's flags are those of the process that is forked.
    stand_in = SimpleNamespace(run=start, _args_from_interpreter_flags=list)
    monkeypatch.setattr(compare, "subprocess", stand_in)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_source_of_chance_of_a_script_is_named(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    """Tensor, cause, and the cure that was tried."""
    script = SCRIPTS[name]
    if name in OF_THE_INTERPRETER:  # 3 s a run, and each trial takes two
        cures = {"order": compare.TRIALS["order"]} if script.cure else {}
        monkeypatch.setattr(compare, "TRIALS", cures)
    else:
        request.getfixturevalue("forks")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    # An optimizer imports a compiler, in 1 s of each run.
    training = CALLS if name in OF_THE_INTERPRETER else TRAINING
    Path("train.py").write_text(f"import torch\n{script.lines}\n{training}")
    status, out, err = run(capfd, "--batches", "1", "--json", "train.py")
    assert out, err
    found = json.loads(out)
    assert status == 1
    assert found["difference"]["label"] == script.tensor, out
    assert script.words in found["difference"]["cause"], out
    cured = [one["change"] for one in found["tried"] if one["outcome"] == "equal"]
    assert len(cured) == bool(script.cure), out
    assert script.cure in "".join(cured)


@pytest.mark.usefixtures("forks")
def test_a_repeatable_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Status 0; its arguments are its own, its output is not shown, and the environment stays."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "import sys, torch\nassert sys.argv == ['train.py', '--json', '3']\nprint('noise')\ntorch.manual_seed(0)\n"
        f"data = torch.utils.data.DataLoader(torch.randn(8, 4), 2, shuffle=True)\n{TRAINING}"
    )
    before = dict(os.environ)
    status, out, err = run(capfd, "train.py", "--json", "3")
    assert (status, err) == (0, "")
    assert out.startswith("Repeatable: 2 runs of train.py are bit-equal.")
    assert "4 batches" in out
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("missing.py",), "there is no script 'missing.py'"),
        (("--batches", "0", "raises.py"), "--batches at least 1"),
        (("raises.py",), "there is nothing to compare in raises.py: KeyError: 'mine'"),
        (("later.py",), "the runs are bit-equal, but each ended by KeyError: 'mine'"),
        (("leaves.py",), "the runs are bit-equal, but each ended by exit status 4"),
        (("gone.py",), "the script ended by status 3: it printed nothing on stderr"),
    ],
)
@pytest.mark.usefixtures("forks")
def test_bad_use(
    arguments: tuple[str, ...],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Status 2, one line on stderr, nothing on stdout."""
    monkeypatch.chdir(tmp_path)
    Path("raises.py").write_text("raise KeyError('mine')\n")
    Path("later.py").write_text("import torch\ntorch.nn.ReLU()(torch.ones(2))\nraise KeyError('mine')\n")
    Path("leaves.py").write_text("import sys, torch\ntorch.nn.ReLU()(torch.ones(2))\nsys.exit(4)\n")
    Path("gone.py").write_text("import os\nos._exit(3)\n")
    status, out, err = run(capfd, *arguments)
    assert (status, out) == (2, "")
    assert words in err
    assert len(err.splitlines()) == 1
