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
    """Only of a cure that works; the written report names its files, and a second failure has a folder of its own."""
    report = growing()
    assert report.finding is not None
    cures = (Cure("widen", False, patch="bad"), Cure("clamp", True, patch="--- a/x\n+++ b/x\n"))
    for name in ("batch-1", "batch-1.2"):
        incident = Incident(replace(report, finding=replace(report.finding, cures=cures)))
        write_failure(incident, None, tmp_path)
        made = tmp_path / name
        assert (made / "cure.patch").read_text() == cures[1].patch
        saved = Report.from_json((made / "report.json").read_text())
        assert saved == incident.report
        assert {Path(one).name for one in saved.finding.files} >= {"report.json", "report.txt", "cure.patch"}
        assert all(Path(one).exists() for one in incident.finding.files)
        assert "no capsule was written: no call was seen" in incident.finding.remarks[-1]
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
    model = nn.Identity()
    start = snapshot_of(model, (torch.ones(2), lambda: None), {})
    report = SpikeReport(410, 0, (Departure("", "loss", 9.1, 2.4, 55.0),), "loss")
    spike = write_spike(report, start, model, tmp_path)
    (capsule,) = [Path(file) for file in spike.files if file.endswith("capsule")]
    (label,) = [text.partition(": ")[0] for text in Capsule.open(capsule).left_out]
    assert label
    assert f"the capsule leaves out {label}; its list left_out says why" in spike.remarks
    monkeypatch.setattr(Capsule, "open", Path("no capsule").read_text)
    spike = write_spike(report, start, model, tmp_path)
    assert spike.remarks[0].startswith("writing the capsule failed: ")
    assert {"report.json", "report.txt"} <= {Path(file).name for file in spike.files}


def test_a_spike_and_frames_of_other_ranks_have_folders(tmp_path: Path) -> None:
    """With the rank in the name; frames alone have no page."""
    spike = SpikeReport(410, 2, (Departure("", "loss", 9.1, 2.4, 55.0),), "loss")
    written = write_spike(spike, None, None, tmp_path)
    assert {Path(one).parent.name for one in written.files} == {"spike-batch-410-rank-2"}
    assert "no capsule was written" in written.remarks[0]
    write_frames(replace(growing(), finding=None), tmp_path / "frames")
    assert sorted(one.suffix for one in (tmp_path / "frames").iterdir()) == [".json", ".txt"]
