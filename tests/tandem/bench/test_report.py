import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tandem.bench.client import UNFINISHED, Sample
from tandem.bench.config import Load
from tandem.bench.report import (
    Limits,
    Report,
    gaps,
    render,
    summarise,
)

LOAD = Load(concurrency=2)


def sample(
    sent_s: float, *arrivals: tuple[float, int], failure: str = "", error: str = ""
) -> Sample:
    """A request; `arrivals` are (seconds after it was sent, tokens so far)."""
    return Sample(
        sent_s=sent_s,
        output_tokens=arrivals[-1][1] if arrivals else 0,
        prompt_tokens=10,
        failure=failure,
        error=error,
        times=[at_s for at_s, _ in arrivals],
        counts=[count for _, count in arrivals],
    )


def test_times_are_those_of_tokens_as_they_arrived():
    one = summarise(LOAD, [sample(10.0, (0.1, 1), (0.3, 3), (0.4, 4))])
    medians = [times.p50 for times in (one.ttft_ms, one.itl_ms, one.tpot_ms, one.e2e_ms)]
    assert medians == pytest.approx([100, 100, 100, 400])
    assert one.output_tokens_per_s == pytest.approx(10)


def test_failed_requests_count_by_kind_with_an_example_and_for_nothing_else():
    failed = [sample(0, (9.0, 3), failure="short", error=f"{i}") for i in range(2)]
    one = summarise(LOAD, [sample(0, (1.0, 4)), *failed, sample(0, failure="HTTP 503")])
    assert (one.num_requests, one.num_done, one.num_failed, one.duration_s) == (4, 1, 3, 1.0)
    assert list(one.failures.items()) == [("short", 2), ("HTTP 503", 1)]
    assert one.errors == {"short": "0", "HTTP 503": ""}


def test_a_load_without_answers_is_still_a_report():
    one = summarise(LOAD, [sample(0, failure="HTTP 503")], limits=Limits(ttft_ms=1))
    assert (one.output_tokens_per_s, one.ttft_ms.count) == (0, 0)
    assert (one.goodput_share, one.goodput_requests_per_s) == (0, 0)
    assert summarise(LOAD, []).num_requests == 0


def test_what_a_stopped_load_had_brought_counts_but_not_as_done():
    one = summarise(LOAD, [sample(0, (1.0, 1), (2.0, 2), failure=UNFINISHED)], is_stopped=True)
    assert (one.num_done, one.num_failed, one.num_unfinished) == (0, 0, 1)
    assert (one.output_tokens, one.ttft_ms.count, one.itl_ms.count) == (2, 1, 1)
    assert (one.e2e_ms.count, one.tpot_ms.count) == (0, 0)


@pytest.mark.parametrize(
    ("limits", "share"),
    [
        (Limits(ttft_ms=150), 0.5),
        (Limits(itl_ms=50), 0.5),  # of the mean: one gap of the first takes 300 ms
        (Limits(ttft_ms=150, itl_ms=50), 0.25),
        (Limits(ttft_ms=500, itl_ms=500), 0.75),
    ],
)
def test_goodput_is_of_requests_that_met_every_limit(limits, share):
    requests = [
        sample(0, (0.1, 1), (0.2, 10), (0.5, 11)),  # 40 ms a token after the first
        sample(0, (0.1, 1), (1.1, 11)),  # 100 ms a token
        sample(0, (0.2, 1), (0.5, 11)),  # 30 ms a token
        sample(0, (0.1, 1), (0.2, 11), failure="cut off"),
    ]
    one = summarise(LOAD, requests, limits=limits)
    assert one.goodput_share == share
    assert one.goodput_requests_per_s == pytest.approx(share * 4 / 1.1)


ARRIVALS = st.lists(
    st.tuples(st.floats(0.001, 10), st.integers(1, 8)), min_size=1, max_size=30
).map(lambda steps: [_sum(steps[: n + 1]) for n in range(len(steps))])


def _sum(steps):
    return sum(gap for gap, _ in steps), sum(count for _, count in steps)


@given(st.lists(st.tuples(st.floats(0, 100), ARRIVALS), min_size=1, max_size=8))
def test_no_token_and_no_time_is_lost_in_the_sums(requests):
    samples = [sample(sent_s, *arrivals) for sent_s, arrivals in requests]
    one = summarise(LOAD, samples)
    for each in samples:
        assert len(gaps(each)) == each.counts[-1] - each.counts[0]
        assert gaps(each).sum() == pytest.approx(each.times[-1] - each.times[0], abs=1e-9)
    assert one.output_tokens == sum(arrivals[-1][1] for _, arrivals in requests)
    for times in (one.ttft_ms, one.itl_ms, one.tpot_ms, one.e2e_ms):
        assert times.p50 <= times.p90 <= times.p99
        assert math.isfinite(times.mean)


def test_a_table_has_a_line_for_each_time_and_says_what_failed_and_what_is_doubtful():
    console = Console(record=True, width=200, markup=False)
    limits = Limits(ttft_ms=500)
    samples = [sample(0.0, (0.1, 1), (2.0, 3)), sample(0.0, failure="cut off", error="after 5")]
    one = summarise(Load(rate=4), samples, limits=limits)
    one = msgspec.structs.replace(one, client_busy_share=0.9)
    report = Report(
        version="1", started_at="now", url="u", api="native", model="m", settings={}, loads=[one]
    )
    render(report, console)
    shown = console.export_text()
    for words in ("TTFT, ms", "ITL, ms", "TPOT, ms", "E2E, ms", "100.0", "950.0"):
        assert words in shown
    assert "1 of 2 requests" in shown
    assert "goodput: 50.0% of requests met the limits" in shown
    assert "failed, cut off: 1, such as: after 5" in shown
    assert "busy 90%" in shown
