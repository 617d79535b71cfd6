"""Webhook: posts failures, spikes and forecasts as JSON, also in the form that Slack shows."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import asdict, replace
from typing import Any
from urllib.parse import urlsplit

from .._version import __version__
from ..util.job import whole_number
from ..util.visible import counts, spell, warn_user
from .messages import Message, MessageSink

_SECONDS = 10.0  # of one request
# Seconds between the attempts of one message.
_DELAYS = (1.0, 2.0, 4.0, 8.0)
_MOST_DELAY = 60.0
# A message of the same event is held back for so many seconds, and counted in the next one.
_PAUSE = 60.0


class WebhookSink(MessageSink):
    """Sink that posts to a URL, which is a secret and is never shown.

    Five attempts a message, one message a minute for each kind of event. One warning says that a server takes nothing.
    """

    in_thread = True
    name = "webhook"

    def __init__(self, url: str = "") -> None:
        # An error of a URL with other characters would quote it.
        is_plain = url.isascii() and url.isprintable() and " " not in url
        if not is_plain or urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ValueError(
                f"the sink {self.name} takes a URL, such as {self.name}:https://example.com/hook"
            )
        self._url = url
        self._sent: dict[str, float] = {}
        self._num_held: dict[str, int] = {}
        self._has_warned = False

    def body(self, message: Message) -> dict[str, Any]:
        """Return what is posted."""
        return {"source": "nanwatch", **asdict(message)}

    def send(self, message: Message) -> None:
        """Post it, unless one of its kind was posted just now. Skipped steps are daily business of a GradScaler."""
        event, now = message.event, time.monotonic()
        if event == "skipped_step":
            return
        if now < self._sent.get(event, -_PAUSE) + _PAUSE:
            self._num_held[event] = self._num_held.get(event, 0) + 1
            return
        self._sent[event] = now
        if num_held := self._num_held.pop(event, 0):
            message = replace(message, text=f"({num_held} more since the last) {message.text}")
        self._post(json.dumps(self.body(message), allow_nan=False).encode())

    def _post(self, body: bytes) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": f"nanwatch/{__version__}"}
        for delay in (*_DELAYS, None):
            try:
                request = urllib.request.Request(self._url, body, headers)
                with urllib.request.urlopen(request, timeout=_SECONDS):
                    return
            except urllib.error.HTTPError as error:
                error.close()
                why, is_final = f"HTTP status {error.code}", error.code < 500 and error.code not in (408, 429)
                least = min(whole_number(error.headers.get("Retry-After", "")) or 0.0, _MOST_DELAY)
            except Exception as error:  # no network, a name that is not found, a certificate
                why, is_final, least = spell(error), False, 0.0
            if is_final or delay is None:
                break
            time.sleep(max(delay, least))
        counts[f"a message of the sink {self.name} was not taken"] += 1
        if not self._has_warned:
            self._has_warned = True
            host = urlsplit(self._url).hostname
            warn_user(
                f"{host} took no message of the sink {self.name}: {why}; the run goes on", may_raise=False
            )


class SlackSink(WebhookSink):
    """Webhook of Slack, which shows at most 40,000 characters."""

    name = "slack"

    def body(self, message: Message) -> dict[str, Any]:
        """Return the sentence with the event, the rank and the host."""
        where = f"rank {message.rank} on {message.host}"
        return {"text": f"nanwatch {message.event}, {where}: {message.text}"[:40_000]}
