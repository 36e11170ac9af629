"""The engine's record of a request, and its validation on arrival.

```
 WAITING ──admitted──▶ RUNNING ──last token, cancel──▶ ENDED          colocated
    ▲                     └──retracted──┐
    └───────────────────────────────────┘
 WAITING ──admitted──▶ RUNNING ──first token, cancel──▶ ENDED         prefill: pages stay until release
 WAITING ──admitted──▶ RESERVED ──landed──▶ RUNNING ──▶ ENDED         decode; retracted as above
```
"""

import math
import weakref
from array import array
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from tandem.engine.grammar.processes import Constraint
from tandem.engine.pages.prefix_cache import Key
from tandem.engine.shape import ModelShape
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import Finish, GenerateRequest, LogprobOptions
from tandem.wire.prefixes import TokenArray, token_array

_INT64 = range(-(2**63), 2**63)
_FLOAT32_MAX = 3.4028234e38
_FLOATS = (
    "temperature",
    "top_p",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)


class Stage(Enum):
    """The stage of a request; see the diagram at the top of this file."""

    WAITING = "waiting"
    RESERVED = "reserved"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False, weakref_slot=True)
class ActiveRequest:
    """A request from its check until its last page is freed.

    Attributes:
        arrival: Sequence number of the arrival at this engine, which a retracted request keeps.
        max_tokens: Length at which generation ends, including the prompt.
        is_prompt_only: Whether the request ends with its first token, for a different node to continue.
        is_remote: Whether a different node computes the prompt into pages granted here; False once landed.
        token_ids: Prompt, then generated tokens.
        page_ids: Pages in order: page i holds tokens i*page_size ... (i+1)*page_size-1.
        slot: Row in `Slots` while the request has pages; else -1.
        num_computed: Tokens whose KV is computed or being computed.
        num_collected: Tokens whose KV is in the pages, because the forward that computed it was collected.
        num_cached: Prompt tokens found in the prefix cache at the first admission.
        from_tiers: Prompt tokens loaded from tiers into the cache for this request, by tier.
        is_counted: Whether `num_cached` was added to the engine's counters.
        is_begun: Whether a forward was launched for the request or its prompt has landed.
        logprobs_until: Prompt position up to which log-probabilities are computed or being computed.
        is_released: Whether nothing reads the pages of this prompt-only request any more.
        num_granted: Number of pages at the end of `page_ids` that a remote writer may write.
        num_pushable: Number of pages at the start of `page_ids` that launched forwards complete.
        num_launched: Number of forwards in flight that include this request.
        waits_for: Request whose prompt this one waits for, because they share a prefix, while that has a `frontier`.
        frontier: Key of the first page of the prompt that is being computed; None unless it is.
        blocked_at: The scheduler's change count when the request last lacked pages; -1 if it never did.
        grammar: The tokens that the grammar allows next; None without a grammar.
        owner: Weak reference to the role's record of this request; unused by the engine.
    """

    request: GenerateRequest
    arrival: int
    max_tokens: int
    seed: int
    is_prompt_only: bool = False
    is_remote: bool = False
    stage: Stage = Stage.WAITING
    token_ids: TokenArray = field(default_factory=lambda: array("q"))
    page_ids: list[int] = field(default_factory=list)
    slot: int = -1
    num_computed: int = 0
    num_collected: int = 0
    num_cached: int = 0
    from_tiers: Mapping[str, int] | None = None
    is_counted: bool = False
    is_begun: bool = False
    logprobs_until: int = 0
    is_released: bool = False
    num_granted: int = 0
    num_pushable: int = 0
    num_launched: int = 0
    waits_for: "ActiveRequest | None" = None
    frontier: Key | None = None
    blocked_at: int = -1
    grammar: Constraint | None = None
    owner: "weakref.ref[Any] | None" = None

    @property
    def num_prompt(self) -> int:
        """Number of prompt tokens of this attempt."""
        return len(self.request.prompt_ids)

    @property
    def num_uncomputed(self) -> int:
        """Number of known tokens whose KV is neither computed nor being computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def granted_pages(self) -> list[int]:
        """Pages that a remote writer may write, in the order of the prompt."""
        return self.page_ids[len(self.page_ids) - self.num_granted :]

    @property
    def output_ids(self) -> TokenArray:
        """Generated tokens of all attempts."""
        return self.token_ids[self.num_prompt - self.request.num_prior_tokens :]

    @property
    def next_index(self) -> int:
        """Index of the next token over all attempts."""
        return len(self.token_ids) - self.num_prompt + self.request.num_prior_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key in the queue; the smallest rank goes first."""
        return (-self.request.priority, self.arrival)

    @property
    def awaits_mask(self) -> bool:
        """Whether the grammar's mask for the next token has neither arrived nor failed."""
        return self.grammar is not None and not self.grammar.mask.done()

    @property
    def num_matchable(self) -> int:
        """Number of leading tokens whose KV may come from the prefix cache.

        The last token is always computed, because its logits give the next token. So is the token before the first
        prompt position whose log-probability is requested here.
        """
        logprobs = self.request.logprobs
        if logprobs is None or logprobs.prompt_start < 0 or self.is_remote:
            return len(self.token_ids) - 1
        return min(max(logprobs.prompt_start, 1), len(self.token_ids)) - 1

    def accept(self, token: int, *, is_last: bool = False) -> None:
        """Append a sampled token. The KV of all earlier tokens must be computed.

        Args:
            is_last: This node generates no further token.

        Raises:
            GrammarViolated: The grammar does not allow the token here; it is not appended.
        """
        if self.grammar is not None:
            self.grammar.accept(token, is_last=is_last)
        self.num_collected = len(self.token_ids)
        self.token_ids.append(token)

    def finish_at(self, token: int, eos_token_ids: frozenset[int]) -> Finish | None:
        """Return the finish reason if generation ends with this token, which is accepted next; else None."""
        sampling = self.request.sampling
        if (token in eos_token_ids and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            return Finish(reason="stop", matched=token)
        return Finish(reason="length") if len(self.token_ids) + 1 >= self.max_tokens else None


# ── the check ────────────────────────────────────────────────────────────────────────────────────


NO_ADAPTERS = "this engine does not support adapters: use a node with --engine vllm"


def check_request(request: GenerateRequest, shape: ModelShape) -> TokenArray:
    """Check that a model of this shape can serve the request, and return its prompt.

    Raises:
        InvalidRequest: The prompt is empty or too long, an id is outside the vocabulary, a number is out of bounds,
            or an adapter is requested.
    """
    prompt = request.prompt_ids
    if not prompt:
        raise InvalidRequest("the prompt is empty")
    if request.adapter:
        raise InvalidRequest(NO_ADAPTERS)
    if fault := _out_of_bounds(request):
        raise InvalidRequest(fault)
    token_ids = _known_tokens(prompt, shape.vocab_size)
    if any(not 0 <= i < shape.vocab_size for i in request.sampling.logit_bias):
        raise InvalidRequest(f"logit_bias ids must be in 0 ... {shape.vocab_size - 1}")
    if len(prompt) >= shape.context_length:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens and the context length is "
            f"{shape.context_length}, including the answer"
        )
    return token_ids


def _known_tokens(prompt: list[int], vocab_size: int) -> TokenArray:
    with suppress(OverflowError):
        token_ids = token_array(prompt)
        column = np.frombuffer(token_ids, np.int64)
        if column.min() >= 0 and column.max() < vocab_size:
            return token_ids
    raise InvalidRequest(f"prompt ids must be in 0 ... {vocab_size - 1}")


def _out_of_bounds(request: GenerateRequest) -> str:
    """Return an error message for the first number out of bounds; empty if there is none.

    Edge workers validate requests of clients, but requests may also come from peers.
    """
    sampling, logprobs = request.sampling, request.logprobs or LogprobOptions()
    integers = [
        ("max_new_tokens", sampling.max_new_tokens, _INT64),
        ("min_new_tokens", sampling.min_new_tokens, _INT64),
        ("top_k", sampling.top_k, _INT64),
        ("priority", request.priority, _INT64),
        ("num_prior_tokens", request.num_prior_tokens, range(len(request.prompt_ids) + 1)),
        *(("stop_token_ids", id_, range(2**31)) for id_ in sampling.stop_token_ids),
        ("num_top", logprobs.num_top, range(1 << 10)),
        ("prompt_start", logprobs.prompt_start, _INT64),
    ]
    for name, value, bounds in integers:
        if value not in bounds:
            return f"{name} is {value}: it must be in {bounds[0]} ... {bounds[-1]}"
    floats = [(name, getattr(sampling, name)) for name in _FLOATS]
    for name, number in [*floats, *(("logit_bias", each) for each in sampling.logit_bias.values())]:
        if not math.isfinite(number) or abs(number) > _FLOAT32_MAX:
            return f"{name} is {number}: it must be a finite 32-bit number"
    if sampling.temperature < 0 or sampling.repetition_penalty <= 0:
        return "temperature must not be negative, and repetition_penalty must be positive"
    if not 0 <= sampling.min_p <= 1:  # above 1 it would exclude every token
        return f"min_p is {sampling.min_p}: it must be in 0 ... 1"
    return ""
