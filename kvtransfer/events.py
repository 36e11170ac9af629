"""What the agents tell their roles. Each names its room; the last of a room's events ends it."""

from dataclasses import dataclass

from tandem.wire.errors import TandemError
from tandem.wire.generation import TokenLogprobs
from tandem.wire.ids import Room

# ── prefill ──────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Granted:
    """Decode granted pages; it already holds the first `have_tokens` tokens of the prompt."""

    room: Room
    have_tokens: int


@dataclass(frozen=True, slots=True)
class PushDone:
    """Last: everything landed and decode was told. The own pages may be reused."""

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
