"""The profile of a simulated engine: how long forwards take. Also reads profile files."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tandem.wire.errors import ConfigInvalid

PROFILE = "simulation#the-profile"  # documentation topic

# At most an hour: a larger value is surely in the wrong unit.
Milliseconds = Annotated[float, msgspec.Meta(ge=0, le=3_600_000)]

PositiveCount = Annotated[int, msgspec.Meta(ge=1)]

SimKV = Literal["real", "none"]


class _Times(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the profile's structs: unknown fields are rejected."""


class PrefillTimes(_Times, frozen=True, kw_only=True):
    """The part of a forward's time that prompts take. Omitted fields are 0.

    Attributes:
        base_ms: Once per forward that computes prompt tokens.
        per_token_ms: Per prompt token computed.
        per_context_token_ms: Per earlier token that attention reads.
        per_pair_ms: Per pair of a computed token and a token that its attention reads: the quadratic
            cost of long prompts.
    """

    base_ms: Milliseconds = 0.0
    per_token_ms: Milliseconds = 0.0
    per_context_token_ms: Milliseconds = 0.0
    per_pair_ms: Milliseconds = 0.0

    def forward_s(
        self, num_tokens: int, num_context_tokens: int, num_pairs: float | None = None
    ) -> float:
        """Return seconds. `num_pairs`: sum of `attended_pairs` over all chunks; None: there is one chunk."""
        if not num_tokens:
            return 0.0
        if num_pairs is None:
            num_pairs = attended_pairs(num_tokens, num_context_tokens)
        attending_ms = self.per_context_token_ms * num_context_tokens + self.per_pair_ms * num_pairs
        return (self.base_ms + self.per_token_ms * num_tokens + attending_ms) / 1000


def attended_pairs(num_tokens: int, num_context_tokens: int) -> float:
    """Return the number of token pairs in one chunk's attention: each token with all up to itself."""
    return num_tokens * (num_context_tokens + (num_tokens + 1) / 2)


class DecodeTimes(_Times, frozen=True, kw_only=True):
    """The part of a forward's time that decoding requests take. Omitted fields are 0.

    Attributes:
        base_ms: Once per forward with decoding requests; on most hardware, reading the weights.
        per_request_ms: Per decoding request, which generates one token.
        per_context_token_ms: Per token of prompt and answer that attention reads, over all requests.
    """

    base_ms: Milliseconds = 0.0
    per_request_ms: Milliseconds = 0.0
    per_context_token_ms: Milliseconds = 0.0

    def forward_s(self, num_requests: int, num_context_tokens: int) -> float:
        """Return seconds. `num_context_tokens`: total over all requests."""
        if not num_requests:
            return 0.0
        reading_ms = self.per_context_token_ms * num_context_tokens
        return (self.base_ms + self.per_request_ms * num_requests + reading_ms) / 1000


class NodeFigures(_Times, frozen=True, kw_only=True):
    """Further properties of the profiled node, for `tandem plan`.

    Attributes:
        model: Name of the model, informational.
        device: Name of the device, informational.
        num_devices: Number of devices that share the model.
        num_tokens: Capacity of the KV pool, in tokens.
        kv_bytes_per_token: Total over all layers and devices.
        link_bytes_per_s: KV bandwidth to another node; 0: unknown.
        host_step_ms: Host time of the engine's loop per forward, device time excluded.
        is_overlapped: Whether that host time overlaps with another forward on the device.
        prefill_error, decode_error: Mean relative error of the fit: 0.05 is 5 %.
        is_estimated: Derived from hardware specifications, not measured.
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
    """How long a forward takes: the sum of the prefill and decode parts.

    Attributes:
        origin: Source of the numbers, informational.
        node: For `tandem plan`; the engine ignores it.
    """

    prefill: PrefillTimes = PrefillTimes()
    decode: DecodeTimes = DecodeTimes()
    origin: str = ""
    node: NodeFigures | None = None


class Simulation(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a simulated model.

    Attributes:
        kv: real: pages have the size of the model's; none: pages are nearly empty.
    """

    profile: Profile = Profile()
    kv: SimKV = "real"


def read_profile(path: Path, flag: str = "--sim-profile") -> Profile:
    """Read a profile file; on an error raise ConfigInvalid that names `flag` and the place in the file."""
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
