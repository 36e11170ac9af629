"""The ring of timings."""

from itertools import count

from tandem.router.recent import RecentRequests


def test_the_last_requests_are_kept_with_when_they_ended():
    recent = RecentRequests(num_kept=3, clock=count(100).__next__)
    timings = {"request_id": "r", "e2e_s": 1.0}
    for number in range(5):
        recent.request_ended({**timings, "request_id": f"r{number}"})
    assert [(one["request_id"], one["ended_unix_s"]) for one in recent.all()] == [
        ("r2", 102),
        ("r3", 103),
        ("r4", 104),
    ]
    assert "ended_unix_s" not in timings


def test_what_was_handed_out_is_not_changed_by_what_comes_later():
    recent = RecentRequests(num_kept=1)
    recent.request_ended({"request_id": "a"})
    before = recent.all()
    recent.request_ended({"request_id": "b"})
    assert [one["request_id"] for one in before] == ["a"]
