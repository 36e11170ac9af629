import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem.frontend.timings import Timings
from tandem.wire.generation import Phase
from tandem.wire.messages import TokenDelta

ROW = ["tokenize", "queue", "pair", "reserve", "prefill_queue", "prefill"]


class Clock:
    def __init__(self):
        self.now = 50.0

    def __call__(self):
        return self.now


def delta(*phases, token_ids=(), cached=0, by_tier=None):
    return TokenDelta(
        request_id="r",
        attempt=0,
        index=0,
        token_ids=list(token_ids),
        cached_tokens=cached,
        cached_by_tier=by_tier or {},
        phases=list(phases),
    )


def durations(report):
    return {phase["name"]: phase["duration_s"] for phase in report.phases}


def started(clock):
    timings = Timings(50.0, clock=clock)
    clock.now = 51.0
    timings.sent()
    return timings


def test_phases_up_to_the_first_token_add_up_to_its_time():
    clock = Clock()
    timings = started(clock)
    clock.now = 58.0
    timings.came(
        delta(
            Phase("queue", 0.0, 1.0),
            Phase("pair", 1.0, 0.5, "http://d"),
            Phase("reserve", 1.5, 0.5, "http://p"),
            Phase("prefill_queue", 2.0, 0.25, "http://p"),
            Phase("prefill", 2.25, 3.0, "http://p"),
            Phase("prefill_chunk", 2.25, 3.0, "http://p"),
            token_ids=[7],
            cached=3,
            by_tier={"host": 2},
        )
    )
    clock.now = 58.5
    assert timings.token_read() == 8.5
    clock.now = 60.0
    timings.came(delta(Phase("landed", 2.0, 4.5, "http://d")))
    timings.num_output_tokens = 9
    report = timings.report("r", 12)
    assert durations(report) == {
        "tokenize": 1.0,
        "queue": 1.0,
        "pair": 0.5,
        "reserve": 0.5,
        "prefill_queue": 0.25,
        "prefill": 3.0,
        "link": 1.75,
        "detokenize": 0.5,
        "stream": 1.5,
    }
    assert [phase["name"] for phase in report.beside] == ["prefill_chunk", "landed"]
    assert report.beside[1]["start_s"] == 3.0
    assert (report.ttft_s, report.e2e_s, report.num_attempts) == (8.5, 10.0, 1)
    assert (report.prefill, report.decode) == ("http://p", "http://d")
    assert (report.num_prompt_tokens, report.num_cached_tokens) == (12, 3)
    assert report.cached_by_tier == {"host": 2}
    assert report.num_output_tokens == 9


def test_a_request_is_over_with_its_last_token_however_late_it_is_reported():
    clock = Clock()
    timings = started(clock)
    timings.came(delta(token_ids=[1]))
    timings.token_read()
    clock.now = 53.0
    assert timings.ended() == 3.0
    clock.now = 60.0  # another choice of the same answer took so long
    report = timings.report("r", 1)
    assert (report.e2e_s, durations(report)["stream"]) == (3.0, 2.0)


def test_attempts_after_the_first_token_stand_beside_the_phases():
    clock = Clock()
    timings = started(clock)
    clock.now = 52.0
    timings.came(delta(Phase("pair", 0.0, 0.5, "d1"), token_ids=[1]))
    timings.token_read()
    clock.now = 56.0
    timings.came(delta(Phase("lost_attempt", 0.5, 2.0), Phase("pair", 2.5, 0.5, "d2")))
    report = timings.report("r", 1)
    assert [phase["name"] for phase in report.beside] == ["lost_attempt", "pair"]
    assert (report.num_attempts, report.decode) == (2, "d2")
    assert durations(report)["stream"] == 4.0


times = st.floats(0, 5, allow_nan=False)


@given(
    st.lists(st.tuples(st.sampled_from(ROW[1:]), times, times), max_size=8),
    times,
    times,
    times,
    times,
)
def test_whatever_nodes_tell_the_sums_hold(told, sent, first, read, rest):
    clock = Clock()
    timings = Timings(50.0, clock=clock)
    clock.now += sent
    timings.sent()
    clock.now += first
    timings.came(delta(*(Phase(*each) for each in told), token_ids=[1]))
    clock.now += read
    timings.token_read()
    clock.now += rest
    report = timings.report("r", 1)
    assert all(phase["duration_s"] >= 0 for phase in report.phases)
    until_first = sum(phase["duration_s"] for phase in report.phases[:-1])
    assert report.phases[-1]["name"] == "stream"
    assert until_first == pytest.approx(report.ttft_s, abs=1e-4)
    assert until_first + report.phases[-1]["duration_s"] == pytest.approx(report.e2e_s, abs=1e-4)
    ends = [phase["start_s"] + phase["duration_s"] for phase in report.phases]
    starts = [phase["start_s"] for phase in report.phases[1:]]
    assert starts == pytest.approx(ends[:-1], abs=1e-4)
