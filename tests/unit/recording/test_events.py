"""Subscriptions to a recorder's events, counted in one mask."""

from __future__ import annotations

from nanwatch.recording.events import Event, Subscriptions


def test_an_event_is_wanted_until_its_last_subscription_is_off() -> None:
    """Two subscriptions to one event are counted; switching one twice does nothing more."""
    subscriptions = Subscriptions()
    first = subscriptions.add(Event.FRAME | Event.BATCH_END)
    second = subscriptions.add(Event.FRAME)
    for _ in range(2):
        first.active = False
    assert [subscriptions.has(event) for event in Event] == [False, False, True, False, False]
    second.remove()
    second.remove()
    assert not any(subscriptions.has(event) for event in Event)
    first.active = True
    assert first.active
    assert [event for event in Event if subscriptions.has(event)] == [Event.BATCH_END, Event.FRAME]
