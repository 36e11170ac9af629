"""What people see: the line while it runs, the table, the page."""

import io
import re
from html.parser import HTMLParser

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from tandem.bench.config import Load
from tandem.bench.live import Watch
from tandem.bench.page import histogram, page
from tandem.bench.plots import from_zero, logarithmic
from tandem.bench.records import Progress, Sample, packed
from tandem.bench.report import ClientCost, Goodput, LoadReport, Report
from tandem.bench.statistics import summarise
from tandem.bench.table import render, warnings

POSITIVE = st.floats(1e-3, 1e7)


def loaded(streams: int = 4, count: int = 40) -> LoadReport:
    samples = [
        Sample(
            due_s=i / 10,
            sent_s=i / 10,
            output_tokens=20,
            prompt_tokens=9,
            **packed([(0.05 + i / 1000 + n * 0.01, n) for n in range(1, 21)]),
        )
        for i in range(count)
    ]
    failed = Sample(due_s=0, sent_s=0, failure="HTTP 503", error="<no> node & none")
    return summarise(Load(streams), [*samples, failed], [0.1], objectives=Goodput(ttft_ms=80))


def report(*loads: LoadReport) -> Report:
    return Report(
        version="1",
        started_at="2026-01-01",
        url="http://x",
        api="native",
        model="<b>model</b>",
        settings={"seed": 1, "trace": ""},
        loads=list(loads),
    )


def printed(*loads: LoadReport) -> str:
    console = Console(file=io.StringIO(), width=100, markup=False)
    render(report(*loads), console)
    return console.file.getvalue()


def test_the_table_says_times_throughput_failures_and_goodput():
    said = printed(loaded())
    assert re.search(r"4 streams +TTFT, ms +79\.5 +79\.5", said)
    assert "40 of 41 requests" in said
    assert "failed, HTTP 503: 1, such as: <no> node & none" in said
    assert re.search(r"goodput: 51\.2% of requests met TTFT ≤ 80 ms", said)


def test_a_load_without_an_answer_shows_dashes():
    assert re.search(r"TTFT, ms +- +- +- +-", printed(summarise(Load(1), [])))


@pytest.mark.parametrize(
    ("kind", "cost", "told"),
    [
        ("closed", ClientCost(num_processes=2, busiest_share=0.9), "more than 2 --clients"),
        ("open", ClientCost(late_p99_ms=500.0), "sent 500 ms or more after they were due"),
    ],
)
def test_a_client_that_measures_itself_says_so(kind, cost, told):
    calm = msgspec.structs.replace(loaded(), kind=kind)
    assert warnings(calm) == []
    (line,) = warnings(msgspec.structs.replace(calm, client=cost))
    assert told in line


def test_nothing_is_due_at_a_time_in_a_closed_loop():
    late = msgspec.structs.replace(loaded(), client=ClientCost(late_p99_ms=500.0))
    assert warnings(late) == []


class Tags(HTMLParser):
    """Counts tags, and fails on one that is not closed or brings something from elsewhere."""

    EMPTY = frozenset({"meta", "line", "path", "circle", "rect"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.svgs = 0

    def handle_starttag(self, tag, attrs) -> None:
        assert not {"src", "href", "onload"} & {name for name, _ in attrs}
        assert tag not in ("script", "link", "b", "no")
        self.svgs += tag == "svg"
        if tag not in ("meta", "i"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs) -> None:
        pass

    def handle_endtag(self, tag) -> None:
        if tag != "i":
            assert self.open.pop() == tag


@pytest.mark.parametrize(
    ("loads", "plots"),
    [([loaded()], 6), ([loaded(1), loaded(8)], 8), ([summarise(Load(1), [])], 0), ([], 0)],
)
def test_the_page_is_whole_needs_nothing_else_and_takes_text_as_text(loads, plots):
    tags = Tags()
    text = page(report(*loads))
    tags.feed(text)
    assert tags.open == []
    assert tags.svgs == plots
    assert "&lt;b&gt;model&lt;/b&gt;" in text
    assert not re.search(r"\b(nan|inf)\b", re.sub(r"<style>.*?</style>", "", text))


@given(st.lists(POSITIVE, min_size=1, max_size=20))
def test_axes_hold_their_values_and_have_ticks_within(values):
    for axis in (from_zero("", values), logarithmic("", values)):
        assert all(-1e-9 <= axis.share(value) <= 1 + 1e-9 for value in values)
        ticks = axis.ticks()
        assert 1 <= len(ticks) <= 12
        assert ticks == sorted(ticks)
        assert all(axis.low <= tick <= axis.high * (1 + 1e-9) for tick in ticks)


@given(st.lists(st.floats(0.001, 10), min_size=1, max_size=60))
def test_a_histogram_holds_all_but_the_slowest_hundredth(times):
    samples = [Sample(due_s=0, sent_s=0, output_tokens=1, **packed([(at, 1)])) for at in times]
    edges, shares = histogram(summarise(Load(1), samples).ttft_ms)
    assert sum(shares) == pytest.approx(0.99, abs=1e-6)
    assert edges == sorted(edges)


def test_the_line_of_a_running_load_adds_its_clients_up():
    watch = Watch(num_requests=10, start_s=100.0)
    done = Sample(due_s=0, sent_s=0)
    cut = Sample(due_s=0, sent_s=0, failure="cut off")
    watch.take(0, Progress(num_running=3, num_tokens=50, samples=[done, done]), 101.0)
    watch.take(1, Progress(num_running=2, num_tokens=30, samples=[cut]), 102.0)
    told = Progress(num_running=4, num_tokens=20, first_token_s=[0.2], gap_s=1.0, num_gaps=40)
    watch.take(0, told, 103.5)
    assert watch.line(104.0) == (
        "3/10 done · 6 running · 1 failed · 25 tokens/s · TTFT 200 ms · ITL 25.0 ms · 9 s left"
    )


def test_the_line_of_a_load_that_has_just_begun_is_one():
    assert Watch(5, 0.0).line(0.0) == "0/5 done · 0 running · 0 failed · 0 tokens/s"
