"""The JSON document of `GET /overview`, which shows the cluster at one moment, and the merge of several workers' documents.

It contains numbers, node names and errors, and never prompts or answers. `console.py` makes it; the page and `tandem top`
show it.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from tandem.router.metrics import Totals
from tandem.wire.messages import NodeLoad

# Limit of requests in a document, also after the documents of several workers were merged.
NUM_SHOWN = 200


class NodeRates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of a node per second, averaged over the last seconds."""

    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    generated_tokens: float = 0.0
    pushed_bytes: float = 0.0
    received_bytes: float = 0.0


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """One node.

    Attributes:
        id: The same id as in `GET /nodes`.
        state: `up`, `down`, `draining` or `leaving`.
        reason: Why it is not used; empty if nothing is wrong.
        load: Its last load report, with its pages by state.
        in_flight_requests: Requests of this router.
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
    """A pair of nodes that this router uses.

    Attributes:
        prefill: Empty if decode computes the prompts itself.
        num_running: Running attempts.
        num_started: Attempts since the pair was first used; idle pairs are forgotten.
        prompt_tokens_per_s: Prompt tokens sent to it per second, averaged over the last seconds.
    """

    prefill: str
    decode: str
    num_running: int
    num_started: int
    prompt_tokens_per_s: float = 0.0


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates of the cluster per second, averaged over the last seconds; decode nodes count the tokens."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    generated_tokens: float = 0.0
    pushed_bytes: float = 0.0


class Quantiles(msgspec.Struct, frozen=True, kw_only=True):
    """Quantiles of durations; None if there are none."""

    p50_s: float | None = None
    p99_s: float | None = None


class Latencies(msgspec.Struct, frozen=True, kw_only=True):
    """Time to first token, mean time between tokens, and total time of recent finished requests."""

    ttft: Quantiles = Quantiles()
    itl: Quantiles = Quantiles()
    e2e: Quantiles = Quantiles()


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """The whole document.

    Attributes:
        now_unix_s: Time of its creation.
        detail: The nodes that serve, or what is missing.
        model, other_models: Names of the models that are served, or were served last.
        num_workers: Number of edge workers whose counts are included.
        silent_workers: Indexes of edge workers that did not reply in time.
        live: Timings so far of running requests, oldest first.
        recent: Timings of ended requests, oldest first; see docs/dashboard.md.
    """

    now_unix_s: float
    version: str
    is_serving: bool
    detail: str
    model: str = ""
    other_models: list[str] = []
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
    """Return quantiles by the nearest-rank method."""
    if not times_s:
        return Quantiles()
    ordered = sorted(times_s)
    p50_s, p99_s = (ordered[math.ceil(part * len(ordered)) - 1] for part in (0.5, 0.99))
    return Quantiles(p50_s=p50_s, p99_s=p99_s)


def restricted(overview: Overview, owner: str | None, after_unix_s: float) -> Overview:
    """Return an overview without the requests of other keys, and without those that ended before a time.

    Args:
        owner: Name of the key whose requests remain; None: those of all keys.
    """
    live, recent = (
        [timings for timings in each if owner in {None, timings["client"]}]
        for each in (overview.live, overview.recent)
    )
    recent = [timings for timings in recent if timings["ended_unix_s"] > after_unix_s]
    return msgspec.structs.replace(overview, live=live, recent=recent)


def merged(own: Overview, others: Sequence[Overview], silent: Sequence[int]) -> Overview:
    """Return the overview of all edge workers of a router.

    All workers watch the same nodes, so nodes are taken from the worker that answers. Counts of requests are added up.
    """
    workers = [own, *others]
    in_flight = Counter[str]()
    for node in (node for one in workers for node in one.nodes):
        in_flight[node.url] += node.in_flight_requests
    recent = sorted(
        (timings for one in workers for timings in one.recent),
        key=lambda each: each["ended_unix_s"],
    )[-NUM_SHOWN:]
    live = sorted(
        (timings for one in workers for timings in one.live),
        key=lambda each: each["started_unix_s"],
    )[-NUM_SHOWN:]
    replace = msgspec.structs.replace
    return replace(
        own,
        num_workers=len(workers),
        silent_workers=list(silent),
        num_in_flight=sum(one.num_in_flight for one in workers),
        num_queued=sum(one.num_queued for one in workers),
        nodes=[replace(node, in_flight_requests=in_flight[node.url]) for node in own.nodes],
        pairs=_merged_pairs(workers),
        totals=Totals(
            **{
                name: sum(getattr(one.totals, name) for one in workers)
                for name in Totals.__struct_fields__
            }
        ),
        rates=replace(own.rates, requests=sum(one.rates.requests for one in workers)),
        latencies=latencies(recent),
        live=live,
        recent=recent,
    )


def _merged_pairs(workers: Sequence[Overview]) -> list[PairView]:
    pairs: dict[tuple[str, str], PairView] = {}
    for pair in (pair for one in workers for pair in one.pairs):
        if (known := pairs.get((pair.prefill, pair.decode))) is not None:
            pair = msgspec.structs.replace(  # noqa: PLW2901 - the sum takes its place
                pair,
                num_running=known.num_running + pair.num_running,
                num_started=known.num_started + pair.num_started,
                prompt_tokens_per_s=known.prompt_tokens_per_s + pair.prompt_tokens_per_s,
            )
        pairs[pair.prefill, pair.decode] = pair
    return list(pairs.values())
