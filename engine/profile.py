"""How long forwards take, as a simulated engine is told, and the file that says it."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tandem.wire.errors import ConfigInvalid

PROFILE = "simulation#the-profile"  # of the documentation

# Up to an hour: more is a mistake in the unit, and would never be waited for.
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=3_600_000)]

PositiveCount = Annotated[int, msgspec.Meta(ge=1)]

SimKV = Literal["real", "none"]


class _Times(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parts of a forward that are told apart; what is left out takes no time."""


class PrefillTimes(_Times, frozen=True, kw_only=True):
    """A forward's part for prompts.

    Attributes:
        base_ms: Once, if any prompt is in it.
        per_token_ms: For each prompt token that it computes.
        per_context_token_ms: For each token before these that their attention reads.
        per_pair_ms: For each pair of a token that it computes and one that this one's attention reads:
            what makes long prompts cost more than their length.
    """

    base_ms: Milliseconds = 0.0
    per_token_ms: Milliseconds = 0.0
    per_context_token_ms: Milliseconds = 0.0
    per_pair_ms: Milliseconds = 0.0

    def forward_s(
        self, num_tokens: int, num_context_tokens: int, num_pairs: float | None = None
    ) -> float:
        """Return seconds; `num_pairs` is the sum of `attended_pairs` of all chunks, None: of one chunk."""
        if not num_tokens:
            return 0.0
        if num_pairs is None:
            num_pairs = attended_pairs(num_tokens, num_context_tokens)
        attending_ms = self.per_context_token_ms * num_context_tokens + self.per_pair_ms * num_pairs
        return (self.base_ms + self.per_token_ms * num_tokens + attending_ms) / 1000


def attended_pairs(num_tokens: int, num_context_tokens: int) -> float:
    """Return how many pairs of tokens the attention of one chunk computes: each with all up to itself."""
    return num_tokens * (num_context_tokens + (num_tokens + 1) / 2)


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
        """Return seconds for the requests and all of their tokens."""
        if not num_requests:
            return 0.0
        reading_ms = self.per_context_token_ms * num_context_tokens
        return (self.base_ms + self.per_request_ms * num_requests + reading_ms) / 1000


class NodeFigures(_Times, frozen=True, kw_only=True):
    """What a node with these times is besides: what a plan of a cluster counts with.

    Attributes:
        model: Name of the model, for people.
        device: Of what it computes with, for people.
        num_devices: Which share the model.
        num_tokens: That its pool holds.
        kv_bytes_per_token: Over all layers and devices.
        link_bytes_per_s: Of KV, to another node; 0: not known.
        host_step_ms: What the engine's loop takes for a forward, besides the device.
        is_overlapped: Whether it does so while the device has another forward.
        prefill_error, decode_error: Of the fit, relative, the mean over all points: 0.05 is 5 %.
        is_estimated: Worked out from figures of the hardware, and not measured.
    """

    model: str = ""
    device: str = ""
    num_devices: PositiveCount = 1
    num_tokens: PositiveCount
    page_size: PositiveCount = 16
    kv_bytes_per_token: PositiveCount
    num_layers: PositiveCount = 32
    context_length: PositiveCount = 131_072
    max_running_requests: PositiveCount = 256
    chunked_prefill_size: PositiveCount = 8192
    link_bytes_per_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    host_step_ms: Milliseconds = 0.0
    is_overlapped: bool = True
    prefill_error: float = 0.0
    decode_error: float = 0.0
    is_estimated: bool = False


class Profile(_Times, frozen=True, kw_only=True):
    """How long a forward takes: the sum of its two parts.

    Attributes:
        origin: Where the numbers come from, for people; nothing reads it.
        node: For `tandem plan`; an engine does not read it.
    """

    prefill: PrefillTimes = PrefillTimes()
    decode: DecodeTimes = DecodeTimes()
    origin: str = ""
    node: NodeFigures | None = None


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in for a model.

    Attributes:
        kv: Whether pages have the bytes that the model's would have, or next to none.
    """

    profile: Profile = Profile()
    kv: SimKV = "real"


def read_profile(path: Path, flag: str = "--sim-profile") -> Profile:
    """Read a profile file; raise ConfigInvalid, which names `flag` and the place in the file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigInvalid(
            f"{flag} {path} cannot be read: {error.strerror}", topic=PROFILE
        ) from error
    except msgspec.DecodeError as error:
        raise ConfigInvalid(
            f"{flag} {path} is no profile: {error}; such as "
            '{"prefill": {"base_ms": 5, "per_token_ms": 0.05}, '
            '"decode": {"base_ms": 10, "per_request_ms": 0.05}}, in milliseconds',
            topic=PROFILE,
        ) from error
