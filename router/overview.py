"""What `GET /overview` says: the cluster at one moment, in one JSON document, and how workers' are merged.

Numbers, node names and errors; never a prompt or an answer. It is made by `observer.py`.
"""

from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.router.events import Event
from tandem.wire.messages import NodeLoad

# Also of what several workers have kept.
NUM_SHOWN = 200


class NodeRates(msgspec.Struct, frozen=True, kw_only=True):
    """What a node does each second, over the last seconds."""

    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    generated_tokens: float = 0.0
    pushed_bytes: float = 0.0
    received_bytes: float = 0.0


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node.

    Attributes:
        id: As `GET /nodes` has it.
        state: up, down, draining or leaving.
        reason: Why it is not used; empty when nothing is wrong.
        load: What it last said of itself, with its pages by state.
        in_flight_requests: Of this router.
    """

    id: str
    url: str
    role: str
    state: str
    reason: str = ""
    zone: str = ""
    load: NodeLoad = NodeLoad()
    rates: NodeRates = NodeRates()
    in_flight_requests: int = 0


class PairView(msgspec.Struct, frozen=True, kw_only=True):
    """A prefill and a decode that this router has paired.

    Attributes:
        prefill: Empty when decode computes prompts by itself.
        num_running: Attempts now.
        num_started: Attempts since the workers began.
        prompt_tokens_per_s: Given to it, over the last seconds.
        pushed_bytes_per_s: Its part of what prefill pushes, by prompt tokens: nodes count by node.
    """

    prefill: str
    decode: str
    num_running: int
    num_started: int
    prompt_tokens_per_s: float = 0.0
    pushed_bytes_per_s: float = 0.0


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Requests since the workers began."""

    num_finished: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_replays: int = 0
    num_refused: int = 0


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What the cluster does each second, over the last seconds; tokens are the decode nodes' own count: each request has one."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    generated_tokens: float = 0.0
    pushed_bytes: float = 0.0


class HistogramView(msgspec.Struct, frozen=True, kw_only=True):
    """Times of the last `histogram_span_s`.

    Attributes:
        bounds_s: Upper bounds of the buckets but the last, which has none.
        counts: Of each bucket: one more than there are bounds, or none where nothing is measured.
        p50_s: As near as the buckets tell; None while there is nothing.
        p99_s: So too.
    """

    bounds_s: list[float] = []
    counts: list[int] = []
    p50_s: float | None = None
    p99_s: float | None = None


def histogram(bounds_s: Sequence[float], counts: Sequence[int]) -> HistogramView:
    """Return a histogram with its quantiles."""
    return HistogramView(
        bounds_s=list(bounds_s),
        counts=list(counts),
        p50_s=_quantile(bounds_s, counts, 0.5),
        p99_s=_quantile(bounds_s, counts, 0.99),
    )


def _quantile(bounds_s: Sequence[float], counts: Sequence[int], part: float) -> float | None:
    """Return a quantile as Prometheus estimates it: evenly within a bucket, at most the last bound."""
    wanted, low_s = part * sum(counts), 0.0
    if not wanted:
        return None
    for bound_s, count in zip(bounds_s, counts, strict=False):
        if count and wanted <= count:
            return low_s + (bound_s - low_s) * wanted / count
        wanted, low_s = wanted - count, bound_s
    return low_s


class Histograms(msgspec.Struct, frozen=True, kw_only=True):
    """As the edge measures them: time to first token, between tokens, and of whole answers."""

    ttft: HistogramView = HistogramView()
    itl: HistogramView = HistogramView()
    e2e: HistogramView = HistogramView()


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """All of it.

    Attributes:
        now_unix_s: When it was made.
        detail: What serves, or what is missing.
        num_workers: Edge workers whose counts are in it.
        silent_workers: Those that did not answer in time.
        recent: Timings of requests, the oldest first; see docs/dashboard.md.
        events: The oldest first.
    """

    now_unix_s: float
    version: str
    is_serving: bool
    detail: str
    model: str = ""
    num_workers: int = 1
    silent_workers: list[int] = []
    num_in_flight: int = 0
    num_queued: int = 0
    nodes: list[NodeView] = []
    pairs: list[PairView] = []
    totals: Totals = Totals()
    rates: Rates = Rates()
    histogram_span_s: float = 0.0
    histograms: Histograms = Histograms()
    recent: list[dict[str, Any]] = []
    events: list[Event] = []


def after(overview: Overview, unix_s: float) -> Overview:
    """Return an overview with only those requests and events that are younger."""
    return msgspec.structs.replace(
        overview,
        recent=[timings for timings in overview.recent if timings["ended_unix_s"] > unix_s],
        events=[event for event in overview.events if event.at_unix_s > unix_s],
    )


def merged(own: Overview, others: Sequence[Overview], silent: Sequence[int]) -> Overview:
    """Return what several edge workers of one router see together.

    All watch the same nodes: how those are, and what happened to them, is taken from the worker that was
    asked. What each worker counts of its own requests is added up.
    """
    every = [own, *others]
    recent = sorted(
        (timings for one in every for timings in one.recent), key=lambda each: each["ended_unix_s"]
    )
    events = [*own.events, *(e for one in others for e in one.events if not e.node)]
    return msgspec.structs.replace(
        own,
        num_workers=len(every),
        silent_workers=list(silent),
        num_in_flight=sum(one.num_in_flight for one in every),
        num_queued=sum(one.num_queued for one in every),
        nodes=_merged_nodes(every),
        pairs=_merged_pairs(every),
        totals=_sum(Totals, [one.totals for one in every]),
        rates=msgspec.structs.replace(own.rates, requests=sum(one.rates.requests for one in every)),
        histograms=Histograms(
            ttft=_merged_histogram([one.histograms.ttft for one in every]),
            itl=_merged_histogram([one.histograms.itl for one in every]),
            e2e=_merged_histogram([one.histograms.e2e for one in every]),
        ),
        recent=recent[-NUM_SHOWN:],
        events=sorted(events, key=lambda event: event.at_unix_s)[-NUM_SHOWN:],
    )


def _merged_nodes(every: Sequence[Overview]) -> list[NodeView]:
    in_flight: dict[str, int] = {}
    for one in every:
        for node in one.nodes:
            in_flight[node.url] = in_flight.get(node.url, 0) + node.in_flight_requests
    return [
        msgspec.structs.replace(node, in_flight_requests=in_flight[node.url])
        for node in every[0].nodes
    ]


def _merged_pairs(every: Sequence[Overview]) -> list[PairView]:
    pairs: dict[tuple[str, str], PairView] = {}
    for one in every:
        for pair in one.pairs:
            place = pair.prefill, pair.decode
            pairs[place] = _sum_pair(pairs[place], pair) if place in pairs else pair
    return shared_pushes(list(pairs.values()), every[0].nodes)


def _sum_pair(one: PairView, other: PairView) -> PairView:
    return msgspec.structs.replace(
        one,
        num_running=one.num_running + other.num_running,
        num_started=one.num_started + other.num_started,
        prompt_tokens_per_s=one.prompt_tokens_per_s + other.prompt_tokens_per_s,
    )


def shared_pushes(pairs: Sequence[PairView], nodes: Sequence[NodeView]) -> list[PairView]:
    """Return pairs with what each prefill pushes shared among its pairs by their prompt tokens."""
    pushed = {node.url: node.rates.pushed_bytes for node in nodes}
    given: dict[str, float] = {}
    for pair in pairs:
        given[pair.prefill] = given.get(pair.prefill, 0.0) + pair.prompt_tokens_per_s
    return [
        msgspec.structs.replace(
            pair,
            pushed_bytes_per_s=pushed.get(pair.prefill, 0.0)
            * (pair.prompt_tokens_per_s / given[pair.prefill] if given[pair.prefill] else 0.0),
        )
        for pair in pairs
    ]


def _merged_histogram(every: Sequence[HistogramView]) -> HistogramView:
    """Add up those that measured something: a worker that has just begun did not."""
    measured = [one for one in every if one.counts]
    if not measured:
        return every[0]
    counts = [sum(column) for column in zip(*(one.counts for one in measured), strict=True)]
    return histogram(measured[0].bounds_s, counts)


def _sum(kind: type[Totals], every: Sequence[Totals]) -> Totals:
    names = kind.__struct_fields__
    return kind(**{name: sum(getattr(one, name) for one in every) for name in names})
