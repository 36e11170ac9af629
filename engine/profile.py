"""How long forwards take, as a simulated engine is told, and the file that says it."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from wire.errors import ConfigInvalid

# Up to an hour: more is a mistake in the unit, and would never be waited for.
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=3_600_000)]

SimKV = Literal["real", "none"]


class _Times(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parts of a forward that are told apart; what is left out takes no time."""


class PrefillTimes(_Times, frozen=True, kw_only=True):
    """A forward's part for prompts.

    Attributes:
        base_ms: Once, if any prompt is in it.
        per_token_ms: For each prompt token that it computes.
        per_context_token_ms: For each token before these that their attention reads.
    """

    base_ms: Milliseconds = 0.0
    per_token_ms: Milliseconds = 0.0
    per_context_token_ms: Milliseconds = 0.0

    def forward_s(self, num_tokens: int, num_context_tokens: int) -> float:
        """Return seconds for so many tokens behind so many."""
        if not num_tokens:
            return 0.0
        reading_ms = self.per_context_token_ms * num_context_tokens
        return (self.base_ms + self.per_token_ms * num_tokens + reading_ms) / 1000


class DecodeTimes(_Times, frozen=True, kw_only=True):
    """A forward's part for running answers.

    Attributes:
        base_ms: Once, if any answer is in it; on most hardware, reading the weights.
        per_request_ms: For each answer, which gets one token.
        per_context_token_ms: For each token of prompt and answer that attention reads, of all requests.
    """

    base_ms: Milliseconds = 0.0
    per_request_ms: Milliseconds = 0.0
    per_context_token_ms: Milliseconds = 0.0

    def forward_s(self, num_requests: int, num_context_tokens: int) -> float:
        """Return seconds for so many requests with so many tokens in all."""
        if not num_requests:
            return 0.0
        reading_ms = self.per_context_token_ms * num_context_tokens
        return (self.base_ms + self.per_request_ms * num_requests + reading_ms) / 1000


class Profile(_Times, frozen=True, kw_only=True):
    """How long a forward takes: the sum of its two parts.

    Attributes:
        origin: Where the numbers come from, for people; nothing reads it.
    """

    prefill: PrefillTimes = PrefillTimes()
    decode: DecodeTimes = DecodeTimes()
    origin: str = ""


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in for a model.

    Attributes:
        kv: Whether pages have the bytes that the model's would have, or next to none.
    """

    profile: Profile = Profile()
    kv: SimKV = "real"


def read_profile(path: Path) -> Profile:
    """Read a profile file.

    Raises:
        ConfigInvalid: It cannot be read, or is no profile; the sentence names the place in it.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigInvalid(f"--sim-profile {path} cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigInvalid(
            f"--sim-profile {path} is no profile: {error}; such as "
            '{"prefill": {"base_ms": 5, "per_token_ms": 0.05}, '
            '"decode": {"base_ms": 10, "per_request_ms": 0.05}}, in milliseconds'
        ) from error
