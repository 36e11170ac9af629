"""What measured transports mean. Pure."""

from collections.abc import Sequence

from tandem.doctor.measuring import Outcome
from tandem.doctor.report import LinkLimits, Status, TransportRow

# What each is held against; those not named, against one bare stream.
MEMORY = ("shm",)
RDMA = ("nixl", "ucx", "mooncake")
NOTHING_LIKE_IT = ("file", "cuda_ipc")

SLOW_OF_LIMIT = 0.5
"""Below this share of its limit a transport gets a warning: on one host all reach more."""


def link_limits(memcpy: Outcome, bare: Outcome, rdma_bytes_per_s: float) -> LinkLimits:
    """Return the limits, from two outcomes and from what RDMA ports say (0: there is none)."""
    stream = bare.measured
    return LinkLimits(
        memcpy_gigabytes_per_s=memcpy.measured.bytes_per_s / 1e9 if memcpy.measured else None,
        socket_gigabytes_per_s=stream.bytes_per_s / 1e9 if stream else None,
        round_trip_us=stream.round_trip_us if stream else None,
        page_us=stream.latency_us if stream else None,
        rdma_gigabytes_per_s=rdma_bytes_per_s / 1e9 or None,
    )


def judge(
    outcomes: Sequence[Outcome], limits: LinkLimits, wanted: Sequence[str], automatic: Sequence[str]
) -> list[TransportRow]:
    """Return a row for each outcome, in order.

    Args:
        wanted: Transports that were asked for by name: each has to work. Empty: at least one has to, and
            of those that `auto` takes none may break after both ends agreed on it.
        automatic: What `auto` takes.
    """
    has_any = any(outcome.kind == "works" for outcome in outcomes)
    rows = []
    for outcome in outcomes:
        is_chosen = outcome.name in (wanted or automatic)
        is_needed = is_chosen and (bool(wanted) or not has_any or outcome.kind == "broke")
        rows.append(_row(outcome, limits, is_needed=is_needed))
    return rows


def _row(outcome: Outcome, limits: LinkLimits, *, is_needed: bool) -> TransportRow:
    measured = outcome.measured
    if measured is None:
        status: Status = "warning" if outcome.kind == "broke" else "missing"
        return TransportRow(
            name=outcome.name,
            status="failed" if is_needed else status,
            advice=_reason(outcome),
        )
    rate = measured.bytes_per_s / 1e9
    name, limit = _limit(outcome.name, limits)
    of_limit = rate / limit if limit else None
    is_slow = of_limit is not None and of_limit < SLOW_OF_LIMIT
    return TransportRow(
        name=outcome.name,
        status="warning" if is_slow else "ok",
        gigabytes_per_s=rate,
        latency_us=measured.latency_us,
        limit=name,
        limit_gigabytes_per_s=limit,
        of_limit=of_limit,
        advice=f"less than half of {_LIMIT_WORDS[name]}" if is_slow else "",
    )


_LIMIT_WORDS = {
    "memcpy": "what one core copies: is another process using the memory bus or this core?",
    "socket": "one bare TCP stream: is this core busy, or the link shared?",
    "rdma": "the port's rate: it may not use RDMA here; see the rdma rows, and UCX_LOG_LEVEL=info",
}


def _limit(transport: str, limits: LinkLimits) -> tuple[str, float | None]:
    if transport in NOTHING_LIKE_IT:
        return "", None
    if transport in MEMORY:
        return "memcpy", limits.memcpy_gigabytes_per_s
    if transport in RDMA and limits.rdma_gigabytes_per_s:
        return "rdma", limits.rdma_gigabytes_per_s
    return "socket", limits.socket_gigabytes_per_s


# What to look at when an end refuses, where its own sentence cannot know it.
_REFUSED_HINTS = {
    "tcp": "its streams take any free port of the receiving host: does a firewall let them through?",
}


def _reason(outcome: Outcome) -> str:
    # The registry's sentences begin with the flag of a node, which nobody gave here.
    reason = outcome.reason.removeprefix(f"--transfer-backend {outcome.name} ")
    if outcome.kind == "broke":
        return f"broke: {reason}"
    hint = _REFUSED_HINTS.get(outcome.name) if outcome.kind == "refused" else None
    return f"{reason}; {hint}" if hint else reason
