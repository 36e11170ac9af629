"""The engine's record of a request, and the check at its arrival.

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
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from tandem.engine.prefix_cache import Key
from tandem.engine.shape import ModelShape
from tandem.wire.errors import InvalidRequest
from tandem.wire.generation import Finish, GenerateRequest, LogprobsWanted

if TYPE_CHECKING:  # a simulated engine starts without xgrammar, which imports torch
    from xgrammar import CompiledGrammar

    from tandem.engine.grammar import GrammarState

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
    """The stage of a request: see the diagram at the top of this file."""

    WAITING = "waiting"
    RESERVED = "reserved"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False, weakref_slot=True)
class ActiveRequest:
    """A request from its check until its last page is freed.

    Attributes:
        arrival: Sequence number of the arrival at this engine; a retracted request keeps it.
        max_tokens: Length at which generation ends, prompt included.
        is_prompt_only: Ends with its first token; another node continues from there.
        is_remote: Another node computes its prompt into pages granted here; False once it has landed.
        token_ids: Prompt, then generated tokens.
        page_ids: In order; page i holds tokens i*page_size ... (i+1)*page_size-1.
        slot: Its row in `Slots` while it has pages; -1 otherwise.
        num_computed: Tokens whose KV is computed or being computed.
        num_collected: Tokens whose KV is in the pages: the forward that computed it was collected.
        num_cached: Prompt tokens found in the prefix cache at its first admission.
        from_tiers: Prompt tokens that tiers brought into the cache for this request, by tier.
        is_counted: Whether `num_cached` was added to the engine's counters.
        is_begun: True once a forward was launched for it or its prompt has landed.
        told_until: Log-probabilities of prompt positions before this one are computed or being computed.
        is_released: Nothing reads the pages of this prompt-only request any more.
        num_granted: Number of last pages that a remote writer may write.
        num_pushable: Number of first pages that launched forwards complete.
        num_launched: Forwards in flight that include this request.
        waits_for: Key of its prompt's next page, which another request is computing.
        frontier: Key of the first prompt page that it computes; other requests may wait for that page.
        blocked_at: The scheduler's change count when pages did not suffice; -1 if not tried.
        compiling: The compilation of its grammar, until that is done.
        grammar: The answer's state in its grammar; None without one, or before it is compiled.
        owner: Weak reference to the role's record of this request; the engine never uses it.
    """

    request: GenerateRequest
    arrival: int
    max_tokens: int
    seed: int
    is_prompt_only: bool = False
    is_remote: bool = False
    stage: Stage = Stage.WAITING
    token_ids: list[int] = field(default_factory=list)
    page_ids: list[int] = field(default_factory=list)
    slot: int = -1
    num_computed: int = 0
    num_collected: int = 0
    num_cached: int = 0
    from_tiers: Mapping[str, int] | None = None
    is_counted: bool = False
    is_begun: bool = False
    told_until: int = 0
    is_released: bool = False
    num_granted: int = 0
    num_pushable: int = 0
    num_launched: int = 0
    waits_for: Key | None = None
    frontier: Key | None = None
    blocked_at: int = -1
    compiling: "Future[CompiledGrammar] | None" = None
    grammar: "GrammarState | None" = None
    owner: "weakref.ref[Any] | None" = None

    @property
    def num_prompt(self) -> int:
        """Prompt tokens of this attempt."""
        return len(self.request.prompt_ids)

    @property
    def num_uncomputed(self) -> int:
        """Known tokens whose KV is neither computed nor being computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def granted_pages(self) -> list[int]:
        """Pages a remote writer may write, in the order of the prompt."""
        return self.page_ids[len(self.page_ids) - self.num_granted :]

    @property
    def output_ids(self) -> list[int]:
        """Generated tokens of all attempts."""
        return self.token_ids[self.num_prompt - self.request.num_prior_tokens :]

    @property
    def next_index(self) -> int:
        """Index of the next token, counted over all attempts."""
        return len(self.token_ids) - self.num_prompt + self.request.num_prior_tokens

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key in the queue: the smallest rank goes first."""
        return (-self.request.priority, self.arrival)

    @property
    def is_ready(self) -> bool:
        """Whether its grammar, if it has one, is compiled; creates `grammar` once it is.

        Raises:
            TandemError: The grammar cannot be compiled.
        """
        if self.compiling is not None and self.compiling.done():
            from tandem.engine.grammar import GrammarState

            self.grammar = GrammarState(self.compiling.result(), self.output_ids)
            self.compiling = None
        return self.compiling is None

    @property
    def num_matchable(self) -> int:
        """Number of first tokens whose KV may come from the prefix cache.

        The last token is always computed, because its logits give the next token. So is the token just
        before the first prompt position whose log-probability is requested here.
        """
        wanted = self.request.logprobs
        if wanted is None or wanted.prompt_start < 0 or self.is_remote:
            return len(self.token_ids) - 1
        return min(max(wanted.prompt_start, 1), len(self.token_ids)) - 1

    def accept(self, token: int) -> None:
        """Append a sampled token. The KV of all tokens before it must be computed.

        Raises:
            GrammarViolated: The grammar does not allow the token here; it is not appended.
        """
        if self.grammar is not None:
            self.grammar.accept(token)
        self.num_collected = len(self.token_ids)
        self.token_ids.append(token)

    def finish_at(self, token: int, eos_token_ids: frozenset[int]) -> Finish | None:
        """Return the finish reason if generation ends with the token just accepted, else None."""
        sampling = self.request.sampling
        if (token in eos_token_ids and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            return Finish(reason="stop", matched=token)
        return Finish(reason="length") if len(self.token_ids) >= self.max_tokens else None


# ── the check ────────────────────────────────────────────────────────────────────────────────────


def check_request(request: GenerateRequest, shape: ModelShape) -> None:
    """Check that a model of this shape can serve the request.

    Raises:
        InvalidRequest: The prompt is empty or too long, an id is outside the vocabulary, a number is
            out of bounds, or an adapter is asked for.
    """
    prompt = request.prompt_ids
    if not prompt:
        raise InvalidRequest("the prompt is empty")
    if request.adapter:
        raise InvalidRequest("this engine has no adapters: --engine vllm has them")
    if fault := _out_of_bounds(request):
        raise InvalidRequest(fault)
    if min(prompt) < 0 or max(prompt) >= shape.vocab_size:
        raise InvalidRequest(f"prompt ids must be in 0 ... {shape.vocab_size - 1}")
    if any(not 0 <= i < shape.vocab_size for i in request.sampling.logit_bias):
        raise InvalidRequest(f"logit_bias ids must be in 0 ... {shape.vocab_size - 1}")
    if len(prompt) >= shape.context_length:
        raise InvalidRequest(
            f"the prompt has {len(prompt)} tokens and the context holds "
            f"{shape.context_length}, the answer included"
        )


def _out_of_bounds(request: GenerateRequest) -> str:
    """Return an error message for the first number out of bounds; empty if there is none.

    Edge workers validate requests of clients; this check also covers requests of peers.
    """
    sampling, wanted = request.sampling, request.logprobs or LogprobsWanted()
    integers = [
        ("max_new_tokens", sampling.max_new_tokens, _INT64),
        ("min_new_tokens", sampling.min_new_tokens, _INT64),
        ("top_k", sampling.top_k, _INT64),
        ("priority", request.priority, _INT64),
        ("num_prior_tokens", request.num_prior_tokens, range(len(request.prompt_ids) + 1)),
        *(("stop_token_ids", id_, range(2**31)) for id_ in sampling.stop_token_ids),
        ("num_top", wanted.num_top, range(1 << 10)),
        ("prompt_start", wanted.prompt_start, _INT64),
    ]
    for name, value, bounds in integers:
        if value not in bounds:
            return f"{name} is {value}: it must be in {bounds[0]} ... {bounds[-1]}"
    floats = [(name, getattr(sampling, name)) for name in _FLOATS]
    for name, number in [*floats, *(("logit_bias", each) for each in sampling.logit_bias.values())]:
        if not math.isfinite(number) or abs(number) > _FLOAT32_MAX:
            return f"{name} is {number}: it must be finite, in 32 bits"
    if sampling.temperature < 0 or sampling.repetition_penalty <= 0:
        return "temperature must not be negative, and repetition_penalty must be positive"
    if not 0 <= sampling.min_p <= 1:  # above 1 it would cut off every token
        return f"min_p is {sampling.min_p}: it must be in 0 ... 1"
    return ""
