"""The timing profile of a simulated engine, and the reader of profile files."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tandem.wire.errors import ConfigInvalid

PROFILE = "docs/simulation.md#the-profile"  # documentation topic

# At most an hour, because a larger value is probably in a different unit.
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=3_600_000)]

SimKV = Literal["real", "none"]


class _Times(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the profile's structs. Unknown fields are rejected."""


class PrefillTimes(_Times, frozen=True, kw_only=True):
    """Time that prompts add to a forward. Omitted fields are 0.

    Attributes:
        base_ms: Time per forward that computes prompt tokens.
        per_token_ms: Time per computed prompt token.
        per_context_token_ms: Time per earlier token that attention reads.
        per_pair_ms: Time per pair of a computed token and a token that its attention reads, which is the quadratic
            cost of long prompts.
    """

    base_ms: Milliseconds = 0.0
    per_token_ms: Milliseconds = 0.0
    per_context_token_ms: Milliseconds = 0.0
    per_pair_ms: Milliseconds = 0.0

    def forward_s(self, num_tokens: int, num_context_tokens: int, num_pairs: float) -> float:
        """Return the time in seconds. `num_pairs` is the sum of `attended_pairs` over all chunks."""
        if not num_tokens:
            return 0.0
        attending_ms = self.per_context_token_ms * num_context_tokens + self.per_pair_ms * num_pairs
        return (self.base_ms + self.per_token_ms * num_tokens + attending_ms) / 1000


def attended_pairs(num_tokens: int, num_context_tokens: int) -> float:
    """Return the number of token pairs in a chunk's attention: each token with all tokens up to itself."""
    return num_tokens * (num_context_tokens + (num_tokens + 1) / 2)


class DecodeTimes(_Times, frozen=True, kw_only=True):
    """Time that decoding requests add to a forward. Omitted fields are 0.

    Attributes:
        base_ms: Time per forward with decoding requests; on most hardware, that of reading the weights.
        per_request_ms: Time per decoding request, which generates one token.
        per_context_token_ms: Time per token of prompt and answer that attention reads, over all requests.
    """

    base_ms: Milliseconds = 0.0
    per_request_ms: Milliseconds = 0.0
    per_context_token_ms: Milliseconds = 0.0

    def forward_s(self, num_requests: int, num_context_tokens: int) -> float:
        """Return the time in seconds. `num_context_tokens` is the total over all requests."""
        if not num_requests:
            return 0.0
        reading_ms = self.per_context_token_ms * num_context_tokens
        return (self.base_ms + self.per_request_ms * num_requests + reading_ms) / 1000


class Profile(_Times, frozen=True, kw_only=True):
    """Duration of a forward, as the sum of its prefill and decode parts.

    Attributes:
        origin: Source of the numbers, for information only.
    """

    prefill: PrefillTimes = PrefillTimes()
    decode: DecodeTimes = DecodeTimes()
    origin: str = ""


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a simulated model.

    Attributes:
        kv: Size of the pages. real: that of the model's KV; none: nearly empty.
    """

    profile: Profile = Profile()
    kv: SimKV = "real"


def read_profile(path: Path) -> Profile:
    """Read the file of `--sim-profile`.

    Raises:
        ConfigInvalid: The file cannot be read or is not a profile. The message names the position in the file.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigInvalid(
            f"--sim-profile {path} cannot be read: {error.strerror}", topic=PROFILE
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigInvalid(
            f"--sim-profile {path} is not a profile: {error}; use milliseconds, for example "
            '{"prefill": {"base_ms": 5, "per_token_ms": 0.05}, '
            '"decode": {"base_ms": 10, "per_request_ms": 0.05}}',
            topic=PROFILE,
        ) from error
