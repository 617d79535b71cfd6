"""A checkpoint with a non-finite weight or optimizer state never takes the place of a good one, on one rank or two."""

import copy
import io
import logging
import os
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file as imported_save_file
from torch import nn

import nanwatch
from support import watching
from support.netcheck_ranks import run_ranks
from support.paths import SCRIPTS

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
    pytest.mark.filterwarnings("ignore:Detected an existing checkpoint"),
]


class Run:
    """A model, its optimizer and an average of its weights, after a step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.model(torch.randn(8, 4)).sum().backward()
        self.optimizer.step()
        self.average = copy.deepcopy(self.model).requires_grad_(False)

    def everything(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "average": self.average}
        return {name: part.state_dict() for name, part in parts.items()} | {"step": 1}

    def watch(self, **options: Any) -> nanwatch.Watch:
        return watching.watch(self.model, guard_checkpoints=True, black_box=False, rerun=False, **options)

    def files(self) -> dict[str, bytes]:
        files = (path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): path.read_bytes() for path in files}


@pytest.fixture
def run(tmp_path):
    return Run(tmp_path)


SAVES: dict[str, Callable[[Run], object]] = {
    "torch": lambda run: torch.save(run.everything(), run.folder / "a.pt"),
    "by keywords": lambda run: torch.serialization.save(obj=run.everything(), f=str(run.folder / "a")),
    "copies": lambda run: torch.save(copy.deepcopy(run.everything()), run.folder / "a.pt"),
    "objects": lambda run: torch.save([run.model, run.optimizer, run.average], run.folder / "a.pt"),
    "thread": lambda run: ThreadPoolExecutor(1).submit(SAVES["torch"], run).result(),
    "save_file": lambda run: imported_save_file(flat(run), str(run.folder / "a.safetensors")),
    "save_model": lambda run: safetensors.torch.save_model(
        nn.ModuleList([run.model, run.average]), str(run.folder / "a.safetensors")
    ),
    "dcp": lambda run: dcp.save(run.everything(), checkpoint_id=run.folder / "a"),
    "dcp writer": lambda run: dcp.save(
        run.everything(), storage_writer=dcp.FileSystemWriter(run.folder / "step-1.5")
    ),
    "dcp async": lambda run: dcp.async_save(run.everything(), checkpoint_id=str(run.folder / "a")).result(),
}


def flat(run: Run) -> dict[str, torch.Tensor]:
    model = run.model.state_dict() | {f"ema.{key}": x for key, x in run.average.state_dict().items()}
    states = run.optimizer.state_dict()["state"]
    moments = {f"state.{key}.exp_avg": value["exp_avg"] for key, value in states.items()}
    return model | moments


# Faults that are planted into a run before it saves.
PLANTED: list[Callable[[Run], object]] = [
    lambda run: run.model[0].weight.data[1].fill_(torch.nan),
    lambda run: run.model[2].bias.data[-1:].fill_(-torch.inf),
    lambda run: run.model[1].running_var[0].fill_(torch.inf),
    lambda run: run.average[0].weight.data.mul_(torch.nan),
    lambda run: run.optimizer.state[run.model[0].weight]["exp_avg"][0].fill_(torch.nan),
]
# Each way to save once, each fault in two ways, and both policies.
CASES = [
    (save, PLANTED[number % 5 if save != "save_model" else 0], ("raise", "warn")[number % 2])
    for number, save in enumerate(SAVES)
]


@pytest.mark.parametrize(("save", "plant", "policy"), CASES)
def test_a_bad_checkpoint_goes_beside_the_good_one(run, save, plant, policy):
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    with run.watch(on_nonfinite=policy) as watch:
        SAVES[save](run)
        good = run.files()
        plant(run)
        if policy == "raise":
            with pytest.raises(nanwatch.NonFiniteError, match=r"\(checkpoint\)") as raised:
                SAVES[save](run)
            assert raised.value.report.finding.phase == "save"
        else:
            with pytest.warns(RuntimeWarning, match=r"nonfinite.*untouched"):
                SAVES[save](run)
            assert watch.report().finding.module == "(checkpoint)"
        after = run.files()
        assert {name: after[name] for name in good} == good
        beside = set(after) - set(good)
        assert {".nonfinite" in name for name in beside} == {True}
        if "a.nonfinite.pt" in beside and save == "torch":
            saved = torch.load(run.folder / "a.nonfinite.pt")
            assert saved["model"]["0.weight"].isnan().sum() == 4
    SAVES[save](run)  # nobody watches any more
    assert run.files() != after


@pytest.mark.parametrize("save", ["objects", "save_file", "save_model", "dcp"])
def test_a_healthy_save_writes_the_same_bytes(run, save, tmp_path):
    files = []
    for name, watch in (("unwatched", nullcontext), ("watched", run.watch)):
        run.folder = tmp_path / name
        run.folder.mkdir()
        with watch(), warnings.catch_warnings():
            warnings.filterwarnings("error", category=RuntimeWarning)
            SAVES[save](run)
        # The metadata of DCP have the path and a random number.
        files.append({name: x for name, x in run.files().items() if ".metadata" not in name})
    assert files[0] == files[1] != {}


def test_memory_gets_a_bad_checkpoint_only_where_the_run_goes_on(run):
    PLANTED[0](run)
    buffer, state = io.BytesIO(), run.model.state_dict()
    for save in (lambda: torch.save(state, buffer), lambda: safetensors.torch.save(state)):
        with run.watch(), pytest.raises(nanwatch.NonFiniteError, match="wrote nothing"):
            save()
    assert buffer.getvalue() == b""
    with run.watch(on_nonfinite="warn"), pytest.warns(RuntimeWarning, match="an open file has no other name"):
        torch.save(state, buffer)
    assert torch.load(io.BytesIO(buffer.getvalue()))["0.weight"].isnan().any()


@pytest.mark.filterwarnings("ignore:.*non-finite")
@pytest.mark.parametrize("is_open", [False, True])
def test_a_program_that_renames_what_it_has_saved_keeps_the_good_one(run, tmp_path, is_open):
    def save():
        with (tmp_path / "new").open("wb") if is_open else nullcontext(tmp_path / "new") as file:
            torch.save(run.model.state_dict(), file)
        os.replace(tmp_path / "new", tmp_path / "last.pt")
        return {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    with run.watch(on_nonfinite="warn"):
        good = save()
        PLANTED[0](run)
        bad = save()
        assert (bad.keys(), bad["last.pt"]) == ({"last.pt", "last.nonfinite.pt"}, good["last.pt"])


class Stateless:
    def __init__(self, model):
        self.model = model

    def __getstate__(self):
        return {}


def test_what_is_not_of_the_model_is_saved_as_asked(run):
    with run.watch():
        torch.save({"losses": torch.tensor([torch.nan, 1.0]), **run.everything()}, run.folder / "a.pt")
        torch.save({"weight": torch.full((3, 3), torch.nan)}, run.folder / "b.pt")  # of another model
        PLANTED[0](run)
        torch.save(run.model[0].weight, io.BytesIO())  # as a thread of DCP does
        torch.save(Stateless(run.model), run.folder / "d.pt")
    assert {"a.pt", "b.pt", "d.pt"} == set(run.files())


def test_infinities_that_are_meant_are_no_fault(tmp_path):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.register_buffer("mask", torch.triu(torch.full((4, 4), -torch.inf), 1))
    model.register_buffer("least", torch.full((3,), torch.inf))  # not a mask, but so from the beginning
    path = tmp_path / "a.pt"
    with nanwatch.watch(model, guard_checkpoints=True, allow="inf:1", black_box=False, rerun=False):
        model[1].weight.data[0, 0] = torch.inf
        torch.save(copy.deepcopy(model.state_dict()), path)
        model[1].weight.data[0, 0] = torch.nan
        with pytest.raises(nanwatch.NonFiniteError, match=r"`1\.weight`"):
            torch.save(model.state_dict(), path)


def test_an_error_of_the_save_is_the_users(run):
    with run.watch(on_nonfinite="warn"):
        with pytest.raises((AttributeError, pickle.PicklingError)):
            torch.save(lambda: None, run.folder / "a.pt")
        with pytest.raises(RuntimeError, match="does not exist"):
            torch.save(run.everything(), run.folder / "missing" / "a.pt")
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'f'"):
            torch.save(run.everything())


def test_two_guards_and_none_leave_the_functions_as_they_were(run):
    places = [torch, torch.serialization, dcp, dcp.state_dict_saver]
    before = [place.save for place in places]
    first = run.watch()
    second = nanwatch.watch(nn.Linear(2, 2), guard_checkpoints=True, black_box=False)
    first.stop()
    assert torch.save is not before[0]
    assert pickle.loads(pickle.dumps(torch.save)) is torch.save
    second.stop()
    assert [place.save for place in places] == before
    with run.watch(enabled=False):
        assert torch.save is before[0]


@pytest.mark.slow
@pytest.mark.skipif(not dist.is_available() or not dist.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize(
    ("policy", "how", "guards", "ends"),
    [
        ("warn", "now", "both", ["returned", "returned"]),
        ("raise", "THREAD", "both", ["CheckpointException", "NonFiniteError"]),
        ("raise", "PROCESS", "both", ["CheckpointException", "NonFiniteError"]),
        ("warn", "now", "second", ["CheckpointException", "returned"]),
    ],
)
def test_no_rank_writes_where_one_refuses(tmp_path, policy, how, guards, ends):
    ranks = run_ranks(2, [str(SCRIPTS / "guarded_ranks.py"), str(tmp_path), policy, how, guards], 300)
    assert [rank.stdout.split() for rank in ranks] == [[end, "True"] for end in ends]
    assert not (tmp_path / "model.nonfinite").exists()
