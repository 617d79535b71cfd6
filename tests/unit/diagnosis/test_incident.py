"""An incident: a report that is completed step by step, and its folder, in which nothing is named that is not there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from nanwatch.capsule.capsule import Capsule
from nanwatch.diagnosis import incident as incidents
from nanwatch.diagnosis.incident import Incident, write_failure, write_frames, write_spike
from nanwatch.report.events import Departure, SpikeReport
from nanwatch.report.finding import Cure
from nanwatch.report.report import Report
from support.examined import snapshot_of
from support.html_page import growing


def test_a_failure_has_its_forms_and_its_patch(tmp_path: Path) -> None:
    """The patch is that of the first working cure that has one; a second failure has a folder of its own."""
    patch = "--- a/x\n+++ b/x\n"
    cures = (Cure("widen", False, patch="bad"), Cure("cast", True), Cure("clamp", True, patch=patch))
    report = replace(growing(), finding=replace(growing().finding, cures=cures, remarks=("seen",)))
    for name in ("batch-1", "batch-1.2"):
        write_failure(incident := Incident(report), None, tmp_path)
        assert (tmp_path / name / "cure.patch").read_text() == patch
        assert Report.from_json((tmp_path / name / "report.json").read_text()) == incident.report
        written = {Path(one).name for one in incident.finding.files if Path(one).exists()}
        assert written - {"report.html"} == {"report.json", "report.txt", "cure.patch"}
        assert len(written) == len(incident.finding.files)
        assert " ".join(incident.finding.remarks).startswith("seen no capsule was written: no call was seen")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["batch-1", "batch-1.2"]
    (tmp_path / "file").write_text("")  # where nothing can be written the report names no file, and says so
    write_failure(incident := Incident(report), None, tmp_path / "file")
    assert incident.finding.files == ()
    assert incident.finding.remarks[-1].startswith("making the folder failed: ")


def test_a_file_is_whole_or_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full leaves nothing of it."""

    def full(self: Path, target: Path) -> Path:
        raise OSError("no space")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="no space"):
        incidents._write_whole(tmp_path / "report.txt", lambda: "text")
    assert list(tmp_path.iterdir()) == []


def test_what_a_capsule_leaves_out_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be read back costs no report."""
    model = nn.Sequential(nn.Identity())
    with torch.autocast("cpu", torch.float16):
        start = snapshot_of(model[0], (torch.ones(2), lambda: None), {})
    torch.rand(1)
    spike = write_spike(SpikeReport(410, 2, (), "loss"), start, model, tmp_path)
    capsule = Capsule.open(spike.files[0])
    assert (capsule.module, capsule.rank, capsule.autocast) == ("0", 2, start.autocast)
    assert torch.equal(capsule.rng.torch, start.rng.torch)
    assert f"leaves out {capsule.left_out[0].partition(': ')[0]}; its list" in spike.remarks[0]
    read = Capsule.open
    monkeypatch.setattr(Capsule, "open", Path("no capsule").read_text)
    write_failure(incident := Incident(growing()), start, tmp_path)
    assert incident.finding.remarks[-1].startswith("writing the capsule failed: ")
    assert read(next(tmp_path.glob("batch*/capsule"))).finding == growing().finding


def test_a_spike_and_frames_of_other_ranks_have_folders(tmp_path: Path) -> None:
    """With the rank in the name; frames alone have no page."""
    spike = SpikeReport(410, 2, (Departure("", "loss", 9.1, 2.4, 55.0),), "loss")
    written = write_spike(spike, None, None, tmp_path)
    assert {Path(one).parent.name for one in written.files} == {"spike-batch-410-rank-2"}
    assert "no capsule was written" in written.remarks[0]
    write_frames(replace(growing(), finding=None), tmp_path / "frames")
    assert sorted(one.suffix for one in (tmp_path / "frames").iterdir()) == [".json", ".txt"]
