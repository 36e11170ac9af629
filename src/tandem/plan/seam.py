"""What a simulated fleet is told, and what it tells: the words between the search and the simulation.

Times are seconds of virtual time. Nothing here computes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tandem.engine.profile import Profile
from tandem.router.config import LOCAL_PREFILL_THRESHOLD

BLOCK_TOKENS = 512
"""Tokens of a prompt that one of `PlannedRequest.blocks` stands for: as in Mooncake's traces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeKind:
    """One kind of node: the hardware of it, and how it is configured.

    Attributes:
        profile: How long its forwards take.
        num_tokens: That its pool holds.
        page_size: Tokens in a page.
        kv_bytes_per_token: Over all layers.
        link_bytes_per_s: Of KV, that its link carries; one way, of all its pushes together.
        cost: Of an hour, or the devices it has: what a plan adds up.
        tp: Devices; their common speed is in `profile`.
        host_step_s: What its loop takes beside the device for each forward.
        num_layers: Parts in which a forward's KV becomes ready to be pushed.
        max_running: Requests with pages at a time.
        chunked_prefill_size: Prompt tokens of one forward.
        context_length: Prompt and answer of one request at most.
        is_overlapped: Whether the loop prepares a forward while the one before runs: on all devices but a CPU.
    """

    name: str
    profile: Profile
    num_tokens: int
    kv_bytes_per_token: int
    link_bytes_per_s: float
    page_size: int = 16
    cost: float = 1.0
    tp: int = 1
    host_step_s: float = 0.0
    num_layers: int = 32
    max_running: int = 256
    chunked_prefill_size: int = 8192
    context_length: int = 131_072
    is_overlapped: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """What a request takes beside the nodes' steps.

    Attributes:
        edge_s: From its first byte at the router to its halves at the nodes, and for its first token
            from the node to the client: both together.
        message_s: From one node to another: grant, landed.
        transfer_s: Of each transfer, besides its bytes.
    """

    edge_s: float = 0.002
    message_s: float = 0.0005
    transfer_s: float = 0.0005


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """Nodes of two kinds behind a router.

    Attributes:
        policy: Name of one of `tandem.router.policies.POLICIES`.
        local_prefill_threshold: See the router's flag of that name.
        num_zones: Nodes of either kind stand in them in turn.
    """

    prefill: NodeKind
    num_prefill: int
    decode: NodeKind
    num_decode: int
    policy: str = "cache_aware"
    local_prefill_threshold: int = LOCAL_PREFILL_THRESHOLD
    num_zones: int = 1
    overheads: Overheads = field(default_factory=Overheads)

    @property
    def cost(self) -> float:
        """Of all nodes together."""
        return self.num_prefill * self.prefill.cost + self.num_decode * self.decode.cost


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request of a load.

    Attributes:
        blocks: Numbers of the first blocks of its prompt, each of `BLOCK_TOKENS` tokens: equal ones are
            the same tokens. What follows, or all where there are none, is the request's own.
        session: Requests of one session have it in common; empty: of none.
    """

    arrival_s: float
    num_prompt: int
    num_output: int
    blocks: Sequence[int] = ()
    session: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What came of one request.

    Attributes:
        token_s: When each token reached the client, in order; shorter than asked where `until_s` came
            before, empty where no token did. Shape (num_tokens,).
        prefill: Index of the node; -1 where there was none, since decode computed the prompt.
        num_cached: Prompt tokens that prefill found in its cache.
        num_kept: Prompt tokens that decode found in its own: they did not travel.
        error: Why it was refused; empty when it was not.
    """

    arrival_s: float
    num_prompt: int
    num_output: int
    token_s: npt.NDArray[np.float64]
    prefill: int = -1
    decode: int = -1
    num_cached: int = 0
    num_kept: int = 0
    error: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether all its tokens came."""
        return len(self.token_s) == self.num_output

    @property
    def ttft_s(self) -> float:
        """Time to first token; infinite when none came."""
        return float(self.token_s[0]) - self.arrival_s if len(self.token_s) else float("inf")

    @property
    def itls_s(self) -> npt.NDArray[np.float64]:
        """Times between tokens. Shape (num_tokens - 1,)."""
        return np.diff(self.token_s)

    @property
    def tpot_s(self) -> float:
        """Mean time of a token after the first; 0 of an answer of one."""
        count = len(self.token_s) - 1
        return float(self.token_s[-1] - self.token_s[0]) / count if count > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of a load.

    Attributes:
        requests: In the order they were given in.
        busy_s: Of the device of each node, prefills before decodes.
        num_retracted: How often a running request had to give its pages back.
        end_s: When the last event was.
    """

    requests: Sequence[Served]
    busy_s: Sequence[float]
    num_retracted: int
    end_s: float
