"""Webhooks: what a real server on this machine gets, and when it is asked again. Lines of JSON, and numbers of logs."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from math import inf, log2
from typing import Any

import pytest
import torch
from torch import nn

import nanwatch
from nanwatch.history.forecast import Forecast
from nanwatch.numerics.ranges import tensor_health
from nanwatch.records.record import Frame, Record
from nanwatch.report.finding import find
from nanwatch.report.text import summary
from nanwatch.sinks import targets
from nanwatch.sinks.sink import BatchSummary
from nanwatch.sinks.targets import LogSink, Message, SlackSink, WebhookSink, batch_values
from nanwatch.util.messages import counts
from support.toys import Scale

FAILURE = Message("failure", 3, "nan first seen in a", {"module": "a"}, 1, "node7")


class Server:
    """Answers with the statuses in turn, the last for ever, and keeps what it gets."""

    def __init__(self, *statuses: int) -> None:
        self.statuses = [*statuses]
        self.bodies: list[Any] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                status = outer.statuses.pop(0) if len(outer.statuses) > 1 else outer.statuses[0]
                self.send_response(status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/secret"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses between attempts, which take no time here."""
    pauses: list[float] = []
    monkeypatch.setattr(targets.time, "sleep", pauses.append)
    return pauses


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    answering = Server(*getattr(request, "param", (200,)))
    yield answering
    answering.close()


def test_a_failure_is_posted_while_the_policy_stays(server: Server) -> None:
    """Named in words alone; the error is raised, the batch is run again, and no thread stays."""
    with nanwatch.watch(model := nn.Sequential(Scale(float("inf"))), sinks=f"webhook:{server.url}") as watch:
        with pytest.raises(nanwatch.NonFiniteError):
            model(torch.ones(2))
        finding = watch.report().finding
        assert finding.operation is not None
    for thread in threading.enumerate():
        if thread.name == "nanwatch webhook":
            thread.join(60)
    (body,) = server.bodies
    assert (body["source"], body["event"], body["batch"]) == ("nanwatch", "failure", 0)
    assert body["facts"]["module"] == "0"
    assert body["text"].startswith("inf first seen in `output` of 0 (Scale) in batch 0")


def test_slack_gets_its_form() -> None:
    sink = SlackSink("https://example.com/hook")
    assert sink.body(FAILURE) == {"text": "nanwatch failure, rank 1 on node7: nan first seen in a"}
    assert len(sink.body(Message("failure", 3, "x" * 50_000))["text"]) == 40_000


@pytest.mark.parametrize(
    ("server", "pauses", "is_lost"),
    [
        ((200,), [], False),
        ((503, 429, 200), [1.0, 2.0], False),
        ((500,), [1.0, 2.0, 4.0, 8.0], True),
        ((404,), [], True),
    ],
    indirect=["server"],
)
def test_it_tries_again_where_that_may_help(server, pauses, is_lost, slept, recwarn):
    """With pauses that double. What is lost is counted, and told without the URL's secret."""
    before = counts["a message of the sink slack was not taken"]
    sink = SlackSink(server.url)
    sink.send(FAILURE)
    sink.finish()
    assert (len(server.bodies), slept) == (len(pauses) + 1, [0.0, *pauses])
    assert counts["a message of the sink slack was not taken"] - before == len(recwarn) == is_lost
    for words in (str(warning.message) for warning in recwarn):
        assert "127.0.0.1 took no message of the sink slack: HTTP status" in words
        assert "secret" not in words


def test_what_is_no_url_is_refused() -> None:
    for words in ("slack", "slack:file:///etc/passwd", "slack:https://a/b c"):
        with pytest.raises(ValueError, match="the sink slack takes a URL, such as slack:https:"):
            nanwatch.watch(nn.Identity(), sinks=words)


def test_a_blocked_server_delays_no_step_and_messages_of_a_kind_are_held_back(monkeypatch):
    """For a minute. The next one says how many."""
    go, posted = threading.Event(), []
    sink = WebhookSink("https://example.com/hook")
    monkeypatch.setattr(sink, "_post", lambda body: (go.wait(60), posted.append(json.loads(body)["text"])))
    for _ in range(3):
        sink.send(FAILURE)
    sink._sent.clear()
    sink.send(FAILURE)
    assert posted == []
    go.set()
    sink.finish()
    assert sorted(posted) == [f"(2 more since the last) {FAILURE.text}", FAILURE.text]


def test_the_numbers_of_a_batch_are_the_doublings_left() -> None:
    """By module over all its calls, the worst first; neither inputs nor zeros, and no module beyond those shown."""
    batch = BatchSummary(3, {})
    tensors = [("a", "output", 8.0), ("", "input", 64.0), ("a", "weight", 32.0), ("", "output", 2.0)]
    for name, role, high in tensors:
        record = Record(role, role, (2,), "float16", 0.0, high, True, None)  # type: ignore[arg-type]
        batch.frames.append(Frame(3, name, "M", (record,)))
    bits = {"a": log2(65504 / 32), "(root)": log2(65504 / 2)}
    expected = {f"nanwatch_headroom_bits/{name}": room for name, room in bits.items()}
    values = batch_values(batch)
    assert {name: values[name] for name in expected} == pytest.approx(expected)
    assert values["nanwatch/headroom_bits"] == values["nanwatch_headroom_bits/a"]
    assert values["nanwatch/headroom_module"] == "a weight, float16"
    full = BatchSummary(4, dict.fromkeys(["a", *map(str, range(255))]))
    full.frames = batch.frames
    assert (set(full.headroom), set(full.curves)) == ({"a", ""}, {"a"})


def test_a_forecast_and_a_fault_are_numbers_and_words() -> None:
    """The batch of the expected overflow and the sentence; a flag and the summary, and no headroom that is not left."""
    health = tensor_health(torch.tensor([1.0, inf]))
    record = Record("output", "output", (2,), "float32", 1.0, inf, False, health)
    finding = find([Frame(4, "wo", "Linear", (record,))])
    assert finding is not None
    entries: list[tuple[int, dict[str, float | str]]] = []
    sink = LogSink(lambda values, batch: entries.append((batch, values)))
    forecast = Forecast("", "output", "float16", 1.9, 0.4, 5300, 600)
    sink.on_forecast(7, forecast)
    sink.on_nonfinite(finding)
    assert entries == [
        (7, {"nanwatch_forecast_batch/(root)": 5300.0, "nanwatch/forecast": str(forecast)}),
        (4, {"nanwatch/is_finite": 0.0, "nanwatch/finding": summary(finding)}),
    ]
