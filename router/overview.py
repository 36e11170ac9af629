"""What `GET /overview` answers: the cluster at one moment in one JSON document, and how workers' are merged.

Numbers, node names and errors; never a prompt or an answer. `console.py` makes it; the page and `tandem top` draw it.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.wire.messages import NodeLoad

# Requests; also of several workers together.
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
        load: What it last reported, with its pages by state.
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
        num_started: Attempts while it was among the pairs used last.
        prompt_tokens_per_s: Given to it, over the last seconds.
    """

    prefill: str
    decode: str
    num_running: int
    num_started: int
    prompt_tokens_per_s: float = 0.0


class Totals(msgspec.Struct, frozen=True, kw_only=True):
    """Requests since the workers began."""

    num_finished: int = 0
    num_failed: int = 0
    num_cancelled: int = 0
    num_replays: int = 0
    num_refused: int = 0


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What the cluster does each second, over the last seconds; tokens as the decode nodes count them."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    generated_tokens: float = 0.0
    pushed_bytes: float = 0.0


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Of times; None while there are none."""

    p50_s: float | None = None
    p99_s: float | None = None


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Of the recent requests that finished: time to first token, mean time between tokens, and of whole answers."""

    ttft: Quantiles = Quantiles()
    itl: Quantiles = Quantiles()
    e2e: Quantiles = Quantiles()


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """All of it.

    Attributes:
        now_unix_s: When it was made.
        detail: What serves, or what is missing.
        num_workers: Edge workers whose counts are in it.
        silent_workers: Those that did not answer in time.
        live: Timings so far of the requests that are answered now, the oldest first.
        recent: Timings of those that ended, the oldest first; see docs/dashboard.md.
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
    latencies: Latencies = Latencies()
    live: list[dict[str, Any]] = []
    recent: list[dict[str, Any]] = []


def latencies(recent: Sequence[dict[str, Any]]) -> Latencies:
    """Return the latencies of these requests."""
    finished = [each for each in recent if each.get("outcome") == "finished"]
    begun = [each for each in finished if each["ttft_s"] is not None]
    return Latencies(
        ttft=_quantiles([each["ttft_s"] for each in begun]),
        itl=_quantiles(
            [
                (each["e2e_s"] - each["ttft_s"]) / (each["num_output_tokens"] - 1)
                for each in begun
                if each["num_output_tokens"] > 1
            ]
        ),
        e2e=_quantiles([each["e2e_s"] for each in finished]),
    )


def _quantiles(times_s: Sequence[float]) -> Quantiles:
    """Return those of nearest rank."""
    if not times_s:
        return Quantiles()
    ordered = sorted(times_s)
    p50_s, p99_s = (ordered[math.ceil(part * len(ordered)) - 1] for part in (0.5, 0.99))
    return Quantiles(p50_s=p50_s, p99_s=p99_s)


def after(overview: Overview, unix_s: float) -> Overview:
    """Return an overview with only those requests that ended later."""
    recent = [timings for timings in overview.recent if timings["ended_unix_s"] > unix_s]
    return msgspec.structs.replace(overview, recent=recent)


def merged(own: Overview, others: Sequence[Overview], silent: Sequence[int]) -> Overview:
    """Return what several edge workers of one router see together.

    All watch the same nodes: those are taken from the worker that was asked. What each worker counts of its own
    requests is added up.
    """
    every = [own, *others]
    in_flight = Counter[str]()
    for node in (node for one in every for node in one.nodes):
        in_flight[node.url] += node.in_flight_requests
    recent = sorted(
        (timings for one in every for timings in one.recent), key=lambda each: each["ended_unix_s"]
    )[-NUM_SHOWN:]
    live = sorted(
        (timings for one in every for timings in one.live), key=lambda each: each["started_unix_s"]
    )[-NUM_SHOWN:]
    replace = msgspec.structs.replace
    return replace(
        own,
        num_workers=len(every),
        silent_workers=list(silent),
        num_in_flight=sum(one.num_in_flight for one in every),
        num_queued=sum(one.num_queued for one in every),
        nodes=[replace(node, in_flight_requests=in_flight[node.url]) for node in own.nodes],
        pairs=_merged_pairs(every),
        totals=Totals(
            **{
                name: sum(getattr(one.totals, name) for one in every)
                for name in Totals.__struct_fields__
            }
        ),
        rates=replace(own.rates, requests=sum(one.rates.requests for one in every)),
        latencies=latencies(recent),
        live=live,
        recent=recent,
    )


def _merged_pairs(every: Sequence[Overview]) -> list[PairView]:
    pairs: dict[tuple[str, str], PairView] = {}
    for pair in (pair for one in every for pair in one.pairs):
        if (known := pairs.get((pair.prefill, pair.decode))) is not None:
            pair = msgspec.structs.replace(  # noqa: PLW2901 - the sum takes its place
                pair,
                num_running=known.num_running + pair.num_running,
                num_started=known.num_started + pair.num_started,
                prompt_tokens_per_s=known.prompt_tokens_per_s + pair.prompt_tokens_per_s,
            )
        pairs[pair.prefill, pair.decode] = pair
    return list(pairs.values())
