"""`nanwatch twice`: sources of chance are named, repeatable scripts are called so; exit status and bad use."""

import json
import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import nanwatch
from nanwatch import __main__ as command
from nanwatch.compare import recording, twice
from support.processes import forked

# An optimizer imports a compiler, in 1 s of each run.
OPTIMIZER = """
optimizer = torch.optim.Adam(model.parameters())
for x in data:
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
CALLS = """
for x in data:
    model(x).square().mean().backward()
"""
MODEL = "model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.Linear(4, 1))\n"
PART = """
import datetime, os, random, time, timeit, numpy, torch
random.seed(a=0), numpy.random.seed(seed=0), torch.manual_seed(seed=0)
race = os.getpid() % 1000 / 1000  # as races of threads and atomics, which no trial touches
class Part(torch.nn.Module):
    def forward(self, x):
        return {}
data = torch.ones(1, 2, 4)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), Part(), torch.nn.Linear(4, 1))
"""


# Script without its training, the first tensor that differs, words of the cause, and those of the cures.
Source = tuple[str, str, str, tuple[str, ...]]


def in_part(expression: str, cause: str, *cures: str) -> Source:
    """Return a model whose middle module returns the expression."""
    return PART.format(expression), "1 output", cause, cures


SEED = ("manual_seed(0)",)
UNSEEDED = f"import torch\ndata = torch.ones(3, 2, 4)\n{MODEL}"
LOADER = f"""
import os, torch
torch.manual_seed(0)
items = torch.arange(80.0).reshape(20, 4)
generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4), 'little'))
data = torch.utils.data.DataLoader(items, 20, shuffle=True, generator=generator)
{MODEL}"""
DROPOUT = f"import torch\ntorch.manual_seed(0)\ndata = torch.ones(1, 20, 4)\n{MODEL}torch.seed()\n"
CLOCKS = (
    "x * (1 + (time.time() + timeit.default_timer() + datetime.datetime.now().microsecond / 1e6"
    " + datetime.datetime.utcnow().microsecond / 1e6 + time.localtime().tm_sec / 60) % 1)"
)
DRAWN = PART.format("x + float(numpy.random.default_rng(seed=None).random())")
SET_ORDER = f"""
import torch
torch.manual_seed(0)
names = {{'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h'}}
data = torch.tensor([ord(name) / 100 for name in names]).reshape(1, 2, 4)
{MODEL}"""
NO_ONE_THREAD = "x + race * (os.environ['OMP_NUM_THREADS'] != '1')"
NO_DETERMINISM = "x + race * (not torch.are_deterministic_algorithms_enabled())"
# Orders and masks are long enough never to be drawn twice.
SOURCES: dict[str, Source] = {
    "unseeded": (UNSEEDED, "0 weight", "does not seed", SEED),
    "loader": (LOADER, " input[0]", "os.urandom()", SEED),
    "dropout": (DROPOUT, "1 output", "does not seed: torch.Generator.seed() at", SEED),
    "clock": in_part(CLOCKS, "datetime.now()", "clocks"),
    "both": (f"{DRAWN}data = data * (time.time() % 1)\n", " input[0]", "2 causes: ", (*SEED, "clocks")),
    "threads": in_part(NO_ONE_THREAD, "threads split", "set_num_threads(1)"),
    "atomics": in_part(NO_DETERMINISM, "atomic", "deterministic"),
    "unknown": in_part("x + race", "no change that was tried"),
    "set_order": (SET_ORDER, " input[0]", "or a set", ("PYTHONHASHSEED=0",)),
}


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run scripts in processes that need not import torch, as 3 s of each run are its imports."""

    def start(command: list[str], *, env: dict[str, str], **_: object) -> subprocess.CompletedProcess[str]:
        return forked(*command[1:], env=env)

    # The interpreter's flags are those of the process that is forked.
    stand_in = SimpleNamespace(run=start, _args_from_interpreter_flags=list)
    monkeypatch.setattr(twice, "subprocess", stand_in)


@pytest.mark.parametrize(
    "name", [name if name == "clock" else pytest.param(name, marks=pytest.mark.slow) for name in SOURCES]
)
def test_a_source_of_chance_is_named(name, tmp_path, monkeypatch, request):
    script, tensor, cause, cures = SOURCES[name]
    if name == "set_order":  # an interpreter draws it when it starts: 3 s a run
        monkeypatch.setattr(twice, "TRIALS", {"order": twice.TRIALS["order"]})
    else:
        request.getfixturevalue("forks")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    Path("train.py").write_text(script + (OPTIMIZER if name == "unseeded" else CALLS))
    found = nanwatch.twice("train.py", batches=1)
    assert f"{found.first.module_a} {found.first.label}" == tensor
    assert cause in found.words("Cause")[0], found.to_text()
    cured = [words for words in found.words("Tried") if words.startswith("bit-equal with")]
    assert len(cured) == bool(cures), found.to_text()
    assert not any(words.startswith("failed") for words in found.words("Tried")), found.to_text()
    assert all(cure in cured[0] for cure in cures)


@pytest.mark.usefixtures("forks")
def test_a_repeatable_script(tmp_path, monkeypatch, capfd):
    """Status 0; its arguments are its own, its output is not shown, and the environment stays.

    The calls of another thread, and of a module that is compiled in place, are compared in any order.
    """
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text(
        "import os, sys, threading, torch\nassert sys.argv == ['train.py', '--json', '3']\nprint('noise')\n"
        "torch.manual_seed(0)\ndata = torch.utils.data.DataLoader(torch.randn(8, 4), 2, shuffle=True)\n"
        "teacher, is_first = torch.nn.Linear(4, 4), not os.path.exists('ran')\nopen('ran', 'w')\n"
        "inputs = [torch.ones(n, 4) for n in ((1, 2) if is_first else (2, 1))]\n"
        "thread = threading.Thread(target=lambda: [teacher(x) for x in inputs])\n"
        f"is_first and (thread.start(), thread.join())\n{MODEL}model.compile(backend='eager'){OPTIMIZER}"
        "is_first or thread.start()"
    )
    before = dict(os.environ)
    status = command.main(["twice", "--json", "train.py", "--json", "3"])
    out, err = capfd.readouterr()
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert (found["equal"], found["headline"]) == (True, "Repeatable: 2 runs of train.py are bit-equal")
    assert found["compared"].startswith("4 batches, ")
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (None, "there is no script 'train.py'"),
        ("raise KeyError('mine')", "there is nothing to compare in train.py: KeyError: 'mine'"),
        (
            "import torch\ntorch.nn.ReLU()(torch.ones(2))\nraise KeyError('mine')",
            "the runs are bit-equal, but each ended by KeyError: 'mine'",
        ),
        ("import os\nos._exit(3)", "the script ended by status 3: it printed nothing on stderr"),
        (
            "from argparse import *\na = ArgumentParser()\na.add_argument('--lr', required=True)\na.parse_args()",
            "exit status 2 (train.py: error: the following arguments are required: --lr)",
        ),
    ],
)
@pytest.mark.usefixtures("forks")
def test_bad_use(script, words, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    if script is not None:
        Path("train.py").write_text(script)
    status = command.main(["twice", "train.py"])
    out, err = capfd.readouterr()
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert words in err


def test_a_loader_under_the_trial_of_its_order_can_be_made_again() -> None:
    options = {"num_workers": 2, "timeout": 3, "prefetch_factor": 4, "persistent_workers": True}
    recording._order_data()
    with recording._undoes:
        loader = torch.utils.data.DataLoader([1], **options)
        again = torch.utils.data.DataLoader([2], **{name: getattr(loader, name) for name in options})
    assert [int(x) for x in again] == [2]
