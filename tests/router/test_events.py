"""Events: which are alike, and what of two looks at the nodes is one."""

from dataclasses import replace

import pytest

from tandem.router.events import ALIKE_S, Events, NodeLook, node_events

UP = NodeLook(role="decode", state="up", reason="", epoch=7, num_corrupted=0)
URL = "http://d:1"
TIER_FULL = ("tier", "decode's tier redis is full")


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def told(events):
    return [(event.kind, event.text, event.count) for event in events.all()]


def test_a_death_under_a_thousand_streams_is_one_line(clock):
    events = Events(clock=clock)
    events.tell("up", "decode is up", URL)
    for number in range(1000):
        # Two deaths take turns.
        events.tell("replay", f"lost stream {number}", alike=f"peer_lost {number % 2}")
    assert told(events) == [
        ("up", "decode is up", 1),
        ("replay", "lost stream 998", 500),
        ("replay", "lost stream 999", 500),
    ]


def test_alike_and_much_later_is_another_event_with_another_id(clock):
    events = Events(clock=clock)
    events.tell("refused", "not started: overloaded", count=3)
    clock.now += ALIKE_S
    events.tell("refused", "not started: overloaded", count=2)
    clock.now += ALIKE_S + 0.1
    events.tell("refused", "not started: overloaded")
    first, second = events.all()
    assert (first.count, first.at_unix_s) == (5, 1000 + ALIKE_S)
    assert (second.count, second.at_unix_s) == (1, clock.now)
    assert first.id != second.id


def test_of_two_nodes_the_same_is_two_events(clock):
    events = Events(clock=clock)
    events.tell("up", "decode is up", "http://d:1")
    events.tell("up", "decode is up", "http://d:2")
    assert [event.node for event in events.all()] == ["http://d:1", "http://d:2"]


def test_the_ring_is_bounded_and_two_workers_name_no_event_alike(clock):
    rings = [Events(num_kept=2, clock=clock) for _ in range(2)]
    for events in rings:
        for number in range(5):
            events.tell("up", f"{number}")
    assert told(rings[0]) == [("up", "3", 1), ("up", "4", 1)]
    assert len({event.id for events in rings for event in events.all()}) == 4


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, UP, [("up", "decode is up")]),
        (None, replace(UP, state="down", reason="not reached yet"), []),
        (UP, UP, []),
        (UP, replace(UP, state="down"), [("down", "decode is down: its engine was lost")]),
        (
            UP,
            replace(UP, state="down", reason="connection refused"),
            [("down", "decode is down: connection refused")],
        ),
        (UP, replace(UP, state="draining"), [("draining", "decode is draining")]),
        (UP, replace(UP, state="leaving"), [("leaving", "decode is leaving")]),
        (UP, None, [("gone", "decode was forgotten")]),
        (UP, replace(UP, epoch=8), [("restarted", "decode began a new life")]),
        (
            replace(UP, state="down"),
            replace(UP, epoch=8),
            [("up", "decode is up, in a new life")],
        ),
        (UP, replace(UP, role="prefill"), [("role", "decode became prefill")]),
        (
            UP,
            replace(UP, num_corrupted=2),
            [("corrupted", "decode refused KV that did not arrive as it was sent: 2")],
        ),
        (UP, replace(UP, tiers={"host": "up"}), []),
        (None, replace(UP, tiers={"redis": "full"}), [("up", "decode is up"), TIER_FULL]),
        (
            replace(UP, tiers={"redis": "backing_off"}),
            replace(UP, tiers={"redis": "full"}),
            [TIER_FULL],
        ),
        (
            replace(UP, tiers={"redis": "backing_off"}),
            replace(UP, tiers={"redis": "up"}),
            [("tier up", "decode's tier redis is up")],
        ),
        # The count begins anew with the life.
        (
            replace(UP, num_corrupted=5),
            replace(UP, epoch=8, num_corrupted=1),
            [
                ("restarted", "decode began a new life"),
                ("corrupted", "decode refused KV that did not arrive as it was sent: 1"),
            ],
        ),
    ],
)
def test_what_changed_between_two_looks_is_told(before, after, expected):
    looks = [{URL: look} if look else {} for look in (before, after)]
    assert list(node_events(*looks)) == [(kind, text, URL) for kind, text in expected]
