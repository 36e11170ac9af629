"""What `tandem doctor --json` prints: the shape that scripts may count on.

A new field has a default, none is renamed or reused.
"""

from typing import Literal

import msgspec

Status = Literal["ok", "warning", "missing", "failed"]
"""`missing`: not there, and nothing that was asked for needs it. `failed`: something asked for does."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was looked at.

    Attributes:
        area: What it belongs to, such as memory or rdma.
        found: What is there.
        advice: What it means and what to do; empty where all is well.
    """

    area: str
    name: str
    status: Status
    found: str
    advice: str = ""


class TransportRow(msgspec.Struct, frozen=True, kw_only=True):
    """One transport between the two ends.

    Attributes:
        gigabytes_per_s: Of scattered pages; None where nothing could be measured.
        latency_us: Of one page, from the call until it is in the far end's memory.
        limit: What it is held against: memcpy (one core), socket (one bare TCP stream) or rdma (the
            rate of the fastest active port); empty where there is nothing like it.
        of_limit: `gigabytes_per_s` over that limit, which for several streams may pass 1.
        advice: Why it does not work and what to do; empty where it works.
    """

    name: str
    status: Status
    gigabytes_per_s: float | None = None
    latency_us: float | None = None
    limit: str = ""
    limit_gigabytes_per_s: float | None = None
    of_limit: float | None = None
    advice: str = ""


class LinkLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What the machine or the network gives, measured in the same run; None: not measured.

    Attributes:
        memcpy_gigabytes_per_s: One core, the same pages, within one process.
        socket_gigabytes_per_s: One TCP stream without any protocol.
        round_trip_us: Of eight bytes and their answer on such a stream.
        page_us: Of one page on such a stream.
        rdma_gigabytes_per_s: What the fastest active port says of itself.
    """

    memcpy_gigabytes_per_s: float | None = None
    socket_gigabytes_per_s: float | None = None
    round_trip_us: float | None = None
    page_us: float | None = None
    rdma_gigabytes_per_s: float | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        between: The two ends that were measured, the writing one first; empty when none were.
        page_bytes: Size of the pages that were moved.
        is_well: Nothing has the status `failed`; the exit status is 0 exactly then.
    """

    version: str
    host: str
    mode: Literal["local", "listen", "connect", "nodes"]
    is_well: bool
    between: list[str] = []
    page_bytes: int = 0
    limits: LinkLimits = LinkLimits()
    transports: list[TransportRow] = []
    findings: list[Finding] = []
