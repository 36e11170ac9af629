"""Overviews made by hand: clusters of any size, and requests of which every number is known."""

import random

import msgspec

from tandem.router.console.overview import (
    Latencies,
    NodeRates,
    NodeView,
    Overview,
    PairView,
    Quantiles,
    Rates,
)
from tandem.router.metrics import Totals
from tandem.wire.messages import NodeLoad, TierLoad

NOW = 1_800_000_000.0
PREFILL, DECODE = "http://10.0.0.1:7000", "http://10.0.1.1:7001"


def timings(request_id="r-1", ended=NOW, **changes) -> dict:
    """A request of 1.2 s whose first token came after 200 ms."""
    before = {
        "tokenize": 0.002,
        "queue": 0.03,
        "pair": 0.001,
        "reserve": 0.012,
        "prefill_queue": 0.035,
        "prefill": 0.11,
        "link": 0.008,
        "detokenize": 0.002,
    }
    start, phases = 0.0, []
    for name, duration in {**before, "stream": 1.0}.items():
        node = {"reserve": DECODE, "stream": DECODE}.get(name, "")
        node = PREFILL if name.startswith("prefill") else node
        phases.append({"name": name, "start_s": start, "duration_s": duration, "node": node})
        start += duration
    beside = [
        {"name": "prefill_chunk", "start_s": 0.08, "duration_s": 0.05, "node": PREFILL},
        {"name": "prefill_chunk", "start_s": 0.13, "duration_s": 0.06, "node": PREFILL},
        {"name": "push", "start_s": 0.09, "duration_s": 0.12, "node": PREFILL},
        {"name": "landed", "start_s": 0.21, "duration_s": 0.001, "node": DECODE},
        {"name": "first_step", "start_s": 0.212, "duration_s": 0.015, "node": DECODE},
    ]
    made = {
        "request_id": request_id,
        "client": "",
        "ttft_s": 0.2,
        "e2e_s": 1.2,
        "num_attempts": 1,
        "num_prompt_tokens": 812,
        "num_cached_tokens": 256,
        "num_output_tokens": 64,
        "outcome": "finished",
        "started_unix_s": ended - 1.2,
        "prefill": PREFILL,
        "decode": DECODE,
        "phases": phases,
        "beside": beside,
        "ended_unix_s": ended,
    }
    return made | changes


def running(request_id="r-1", **changes) -> dict:
    """A request that has waited for its first token for half a second."""
    begun = timings(request_id, outcome="running", ttft_s=None, e2e_s=0.5, num_output_tokens=0)
    wait = {"name": "unanswered", "start_s": 0.032, "duration_s": 0.468, "node": ""}
    del begun["ended_unix_s"]
    return begun | {"phases": [*begun["phases"][:2], wait], "beside": []} | changes


def node(role: str, number: int, **changes) -> NodeView:
    """A node that does something, the more the higher its number."""
    host = f"10.0.{0 if role == 'prefill' else 1}.{number}:{7000 if role == 'prefill' else 7001}"
    num_pages, held, cached = 4096, (311 * number) % 2200, (173 * number) % 1500
    granted = 64 if role == "decode" else 0
    load = NodeLoad(
        num_running=number % 17,
        num_waiting=number % 3,
        num_transferring=number % 4,
        num_pages=num_pages,
        pages_held=held,
        pages_cached=cached,
        pages_granted=granted,
        pages_free=num_pages - held - cached - granted,
        page_size=16,
        prompt_tokens=90_000 * number,
        cached_tokens=30_000 * number,
        generated_tokens=40_000 * number,
    )
    rates = NodeRates(
        prompt_tokens=900.0 * number,
        generated_tokens=120.0 * number if role == "decode" else 0.0,
        pushed_bytes=4e7 * number if role == "prefill" else 0.0,
        received_bytes=3e7 * number if role == "decode" else 0.0,
    )
    view = {"id": host, "url": f"http://{host}", "role": role, "state": "up", "load": load}
    return NodeView(**view | {"rates": rates} | changes)


def tiers(hit_tokens=27_000, redis="up") -> list[TierLoad]:
    """Half-full host memory that an eighth of the prompt tokens came from, and a store without a limit of its own."""
    host = TierLoad(
        name="host",
        num_pages=2048,
        num_bytes=4 << 30,
        limit_bytes=8 << 30,
        hit_tokens=hit_tokens,
        missed_tokens=40_000,
        late_tokens=512,
        put_bytes=9 << 30,
        got_bytes=3 << 30,
        num_evicted=77,
        token_cost=0.04,
    )
    store = TierLoad(
        name="redis",
        store="redis://10.0.9.1:6379/0",
        state=redis,
        num_pages=90_000,
        num_bytes=180 << 30,
        hit_tokens=hit_tokens // 3,
        num_failures=3 if redis != "up" else 0,
    )
    return [host, store]


def tiered(prefills: int, decodes: int, **changes) -> Overview:
    """A cluster whose prefills have tiers; the first of them cannot reach its store."""
    made = cluster(prefills, decodes, **changes)
    nodes = [
        msgspec.structs.replace(
            node,
            load=msgspec.structs.replace(
                node.load,
                tiers=tiers(node.load.prompt_tokens // 8, "up" if number else "backing_off"),
            ),
        )
        if node.role == "prefill"
        else node
        for number, node in enumerate(made.nodes)
    ]
    return msgspec.structs.replace(made, nodes=nodes)


def overview(nodes=(), pairs=(), **changes) -> Overview:
    made = {
        "now_unix_s": NOW,
        "version": "0.1.0",
        "is_serving": bool(nodes),
        "detail": f"{len(nodes)} nodes serve" if nodes else "no node is known",
        "model": "SmolLM2-135M-Instruct",
        "nodes": list(nodes),
        "pairs": list(pairs),
    }
    if nodes:
        made |= {
            "num_in_flight": 42,
            "rates": Rates(requests=7.3, prompt_tokens=5210.0, generated_tokens=1932.0),
            "totals": Totals(num_finished=4210, num_replays=2),
            "latencies": Latencies(
                ttft=Quantiles(p50_s=0.07, p99_s=0.48),
                itl=Quantiles(p50_s=0.012, p99_s=0.038),
                e2e=Quantiles(p50_s=1.2, p99_s=7.4),
            ),
        }
    return Overview(**made | changes)


def cluster(prefills: int, decodes: int, seed: int = 0, **changes) -> Overview:
    """Every prefill feeds some decodes."""
    rng = random.Random(seed)
    nodes = [node("prefill", number + 1) for number in range(prefills)]
    nodes += [node("decode", number + 1) for number in range(decodes)]
    pairs = [
        PairView(
            prefill=nodes[prefill].url,
            decode=nodes[prefills + decode].url,
            num_running=rng.randrange(1, 6),
            num_started=100,
            prompt_tokens_per_s=4e4 * rng.random(),
        )
        for prefill in range(prefills)
        for decode in range(decodes)
        if rng.random() < max(0.12, 2 / decodes)
    ]
    return overview(nodes, pairs, **changes)
