"""Plugins of engines: which requests of a served batch were bad, with a model and steps as an engine makes them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from operator import itemgetter

import pytest
import torch
from torch import Tensor, nn

import nanwatch
from nanwatch.integrations.serving import ServedModel, Share, owner_of
from support.processes import environment, forked
from support.toys import Scale

# Two requests in prefill, of three tokens and of two, and one that decodes its tenth token.
SHARES = (
    Share("a", "prefill", 3, 0, blocks=(7, 8), block_size=2),
    Share("b", "prefill", 2, 4, blocks=(5,), block_size=8),
    Share("c", "decode", 1, 9, blocks=(1, 2), block_size=4),
)


class Spoiled(nn.Module):
    """Makes chosen rows of its input nan."""

    rows: Sequence[int] = ()

    def forward(self, x: Tensor) -> Tensor:
        return x.index_fill(0, torch.tensor(self.rows, dtype=torch.long), float("nan"))


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> ServedModel:
    monkeypatch.delenv("NANWATCH_OPTIONS", raising=False)
    return ServedModel()


def model() -> nn.Sequential:
    return nn.Sequential(Scale(), Spoiled(), nn.Identity())


def step(served: ServedModel, net: nn.Module, rows: Sequence[int] = ()) -> None:
    """Run one step of six tokens, whose root is not called as a module, as in vLLM and SGLang."""
    net[1].rows = rows  # type: ignore[index]
    served.start(net)
    served.step_begins(lambda: SHARES)
    served.step_ended(nn.Sequential.forward(net, torch.ones(6, 4)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("row", "num_rows", "expected"),
    [
        (0, 6, ("a", 0)), (2, 6, ("a", 2)), (3, 6, ("b", 4)), (5, 6, ("c", 9)), (6, 8, None),
        (0, 3, ("a", 2)), (1, 3, ("b", 5)), (2, 3, ("c", 9)), (1, 4, None),
    ],
)  # fmt: skip
def test_a_row_has_an_owner(row: int, num_rows: int, expected: tuple[str, int] | None) -> None:
    """A tensor has a row for each token, some as padding, or one for each request: its last token's."""
    owner = owner_of(SHARES, row, num_rows)
    assert (None if owner is None else (owner[0].request, owner[1])) == expected


def test_the_requests_of_bad_rows_are_named(served: ServedModel, caplog: pytest.LogCaptureFixture) -> None:
    """With the module, the phase, the token and its KV block; each once; in the log and in the answer."""
    net = model()
    step(served, net)
    assert not served.requests
    step(served, net, rows=[2, 5])
    step(served, net, rows=[2, 3])
    answer = json.loads(json.dumps(served.answer()))
    place = itemgetter("request", "phase", "position", "block")
    assert [*map(place, answer["requests"])] == [
        ("a", "prefill", 2, 8),
        ("c", "decode", 9, None),
        ("b", "prefill", 4, 5),
    ]
    assert {request["module"] for request in answer["requests"]} == {"1"}
    assert len(caplog.records) == 3
    assert "request a in prefill, token 2, KV block 8 was not finite: nan first seen" in caplog.text
    finding = nanwatch.Report.from_json(answer["report"]).finding
    assert "in a row of request a in prefill, token 2, KV block 8" in finding.remarks


SCRIPT = """
import sys
from nanwatch.integrations import start_in_sglang, start_in_vllm
start_in_sglang()
start_in_vllm()
parts = "nanwatch.session", "nanwatch.instrumentation", "sglang", "vllm"
assert not any(name.startswith(parts) for name in sys.modules)
"""


def test_without_the_switch_no_part_of_a_watch_is_imported() -> None:
    """Neither engine is installed here, so that the plugin itself could not start."""
    done = forked("-c", SCRIPT, env=environment(NANWATCH=""), imported=False)
    assert done.returncode == 0, done.stderr
