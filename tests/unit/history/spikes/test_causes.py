"""The rule for the cause."""

from __future__ import annotations

import pytest

from nanwatch.history.spikes.causes import Evidence, cause_of
from nanwatch.report.spike import Departure


def left(*names: str) -> list[Departure]:
    """Departures of "module label"."""
    return [Departure(*name.split(" ", 1), 64.0, 1.0, 50.0) for name in names]


GAN = left(
    "critic.0 input[0]",
    "critic.0 output",
    "critic input[0]",
    "critic output",
    "maker.2 weight",
    "maker.2 output",
)


@pytest.mark.parametrize(
    ("evidence", "cause", "first"),
    [
        (
            {"forward": left("rnn input[0]", " input[0]"), "inputs": left(" input[0]")},
            "input",
            "rnn input[0]",
        ),
        ({"forward": GAN, "inputs": left("critic input[0]")}, "weight", "maker.2 weight"),
        ({"forward": GAN[:4], "inputs": left("critic input[0]")}, "input", "critic.0 input[0]"),
        ({"forward": left("a output"), "rates": (0.1, 1.0)}, "learning rate", "a output"),
        ({"forward": left("a weight"), "optimizer": left("a exp_avg")[0]}, "optimizer", "a exp_avg"),
        ({"forward": left("a weight"), "spoilt": left("a bias.grad")[0]}, "gradient", "a bias.grad"),
        ({"forward": left("b output"), "changed": dict.fromkeys(left("b weight"), 9)}, "weight", "b weight"),
        # Its input is as unusual as its output: the weight explains nothing.
        (
            {"forward": left("b input[0]", "b output"), "changed": dict.fromkeys(left("b weight"), 9)},
            "module",
            "b input[0]",
        ),
        ({"forward": left("a weight", "b weight")}, "weight", "a weight"),
        ({"forward": left("embed output"), "first_outputs": [("embed", "output")]}, "input", "embed output"),
        (
            {
                "forward": left("a output"),
                "first_outputs": [("a", "output")],
                "read_inputs": frozenset({"a"}),
            },
            "module",
            "a output",
        ),
        ({"forward": [], "backward": left("a output.grad")}, "gradient", "a output.grad"),
        ({"forward": [], "backward": left("a output.grad"), "jumps": left(" loss")}, "loss", None),
        ({"forward": left(" input[labels]"), "inputs": left(" input[labels]")}, "loss", " input[labels]"),
    ],
)
def test_cause(evidence: dict, cause: str, first: str | None) -> None:
    found, shown = cause_of(Evidence(**{"jumps": left(" gradients"), **evidence}))
    assert (found, None if shown is None else f"{shown.module} {shown.label}") == (cause, first)
