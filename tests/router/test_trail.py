from tandem.router.trail import Trail
from tandem.wire.generation import Phase


class Clock:
    now = 10.0

    def __call__(self):
        return self.now


def trail_at(clock, *ends):
    trail = Trail(clock)
    for name, at in ends:
        clock.now = 10.0 + at
        trail.end(name, "d" if name == "pair" else "")
    return trail


def test_the_routers_own_phases_follow_each_other():
    trail = trail_at(Clock(), ("queue", 1.0), ("pair", 1.5))
    assert trail.take() == [Phase("queue", 0.0, 1.0), Phase("pair", 1.0, 0.5, "d")]


def test_what_a_node_tells_is_counted_from_when_the_attempt_was_sent():
    trail = trail_at(Clock(), ("queue", 1.0), ("pair", 2.0))
    trail.take()
    trail.heard([Phase("reserve", 0.0, 0.5), Phase("prefill", 0.5, 3.0)], "p")
    assert trail.take() == [Phase("reserve", 2.0, 0.5, "p"), Phase("prefill", 2.5, 3.0, "p")]


def test_of_a_lost_attempt_one_phase_is_left():
    clock = Clock()
    trail = trail_at(clock, ("queue", 1.0), ("pair", 2.0))
    trail.heard([Phase("reserve", 0.0, 0.5)], "p")
    clock.now = 15.0
    trail.lost()
    clock.now = 15.5
    trail.end("pair", "d2")
    trail.heard([Phase("reserve", 0.0, 0.25)], "p2")
    assert [(each.name, each.start_s, each.duration_s) for each in trail.take()] == [
        ("queue", 0.0, 1.0),
        ("pair", 1.0, 1.0),
        ("lost_attempt", 2.0, 3.0),
        ("pair", 5.0, 0.5),
        ("reserve", 5.5, 0.25),
    ]


def test_nothing_is_told_twice():
    trail = trail_at(Clock(), ("queue", 1.0))
    trail.take()
    assert trail.take() == []
