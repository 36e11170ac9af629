"""What the agents report to their roles. Each event names its room; the last of a room's events ends it.

Also how long hand-offs take, as the agent of each end sees them, for operators.
"""

from dataclasses import dataclass, field

from tandem.telemetry.histogram import Histogram
from tandem.wire.errors import TandemError
from tandem.wire.generation import Room, TokenLogprobs

# ── prefill ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Granted:
    """Decode granted pages; it already holds the first `have_tokens` tokens of the prompt."""

    room: Room
    have_tokens: int


@dataclass(frozen=True, slots=True)
class PushDone:
    """Last: all KV is in decode's memory, and decode has been notified. The own pages may be reused."""

    room: Room
    pushed_bytes: int


@dataclass(frozen=True, slots=True)
class Released:
    """Last: the room ended without landing. The own pages may be reused.

    Attributes:
        error: Why; None when the role itself aborted it.
    """

    room: Room
    error: TandemError | None = None


SenderEvent = Granted | PushDone | Released

# ── decode ───────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Landed:
    """Last: the granted pages hold the prompt, and the checksums agree. They are the role's."""

    room: Room
    first_token: int
    seed: int
    cached_tokens: int
    first_logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """Last: the pages hold nothing of use, and no write can arrive. They may be reused."""

    room: Room
    error: TandemError


@dataclass(frozen=True, slots=True)
class Lost:
    """The hand-off failed, and a write may still arrive: quarantine the pages. `Safe` follows."""

    room: Room
    error: TandemError


@dataclass(frozen=True, slots=True)
class Safe:
    """Last, after `Lost` or a withdrawal: no write can arrive any more. The pages may be reused."""

    room: Room


ReceiverEvent = Landed | Failed | Lost | Safe

# ── times ────────────────────────────────────────────────────────────────────────────────────────

# From a page within one machine to a long prompt over a slow network, or a queue for pages.
_SECONDS = (
    *(0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2),
    *(0.5, 1.0, 2.0, 5.0, 10.0, 30.0),
)


@dataclass(eq=False)
class SenderTimes:
    """Times of a prefill agent's hand-offs. Its control thread writes, any thread may read.

    Attributes:
        bootstrap_seconds: From the request to the grant of its pages.
        push_seconds: From when the first pages of a room could be pushed to the end of its last
            write. Rooms of which decode had everything are left out.
        push_exposed_seconds: The part of it behind the last chunk, when nothing is computed beside it.
        num_lost_links: Decode nodes whose link broke or fell silent.
    """

    bootstrap_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    push_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    push_exposed_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    num_lost_links: int = 0


@dataclass(eq=False)
class ReceiverTimes:
    """Times of a decode agent's hand-offs. Its control thread writes, any thread may read.

    Attributes:
        granted_seconds: From a grant to the prompt in its pages. Until then they are of no use.
        num_lost_links: Prefill nodes whose link broke or fell silent.
    """

    granted_seconds: Histogram = field(default_factory=lambda: Histogram(_SECONDS))
    num_lost_links: int = 0
