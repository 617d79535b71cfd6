"""nanwatch's exceptions in another process: what DataLoaders, pools, `spawn` and torchrun show of them."""

from __future__ import annotations

import json
from pathlib import Path

from support.paths import SCRIPTS
from support.processes import forked

TOLD = {
    "nonfinite": ("NonFiniteError", "nan first seen in `output` of 1 (LayerNorm) in batch 0"),
    "peer": ("PeerNonFiniteError", "in batch 0 on rank 0, which produced it"),
    "batch_limit": ("BatchLimitError", "stopped after batch 0, as abort_after_batch=0 asks"),
    "capsule": ("CapsuleError", r"no\nsuch/capsule.json: No such file or directory"),
    "trace": ("TraceError", "run.parquet is no Parquet file that can be read"),
}


def test_an_error_of_a_worker_is_told_by_its_parent(tmp_path: Path) -> None:
    """Pickles carry type and report, ExceptionWrapper the type and a text of several lines, `spawn` a text."""
    ran = forked(str(SCRIPTS / "error_channels.py"), cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    came = [json.loads(line) for line in ran.stdout.splitlines()]
    assert len(came) == 5 * len(TOLD)
    for one in came:
        kind, words = TOLD[one["failure"]]
        is_pickled = one["channel"] in ("in_a_future", "in_a_pool")
        assert words in one["text"], one
        assert one["finding"] == (is_pickled and one["failure"] in ("nonfinite", "peer")), one
        if is_pickled:
            assert one["type"] == kind, one
        elif one["channel"] == "in_a_loader":
            assert one["type"] == kind, one
            assert one["text"].splitlines()[0] == f"Caught {kind} in DataLoader worker process 0.", one
        else:
            assert kind in one["text"], one
