"""One request as an engine knows it.

```
 WAITING ──admitted──▶ RUNNING ──last token, cancel──▶ ENDED          colocated
    ▲                     └──retracted──┐
    └───────────────────────────────────┘
 WAITING ──admitted──▶ RUNNING ──first token, cancel──▶ ENDED         prefill: pages stay until release
 RESERVED ──landed──▶ RUNNING ──last token, cancel──▶ ENDED           decode; retracted as above
```
"""

import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from tandem.engine.prefix_cache import Key
from tandem.engine.seen import Seen
from tandem.wire.generation import Finish, GenerateRequest

if TYPE_CHECKING:  # a simulated engine starts without the library of grammars, and torch under it
    from xgrammar import CompiledGrammar

    from tandem.engine.grammar import GrammarState


class Stage(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RESERVED = "reserved"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False, weakref_slot=True)
class ActiveRequest:
    """A request between admission and the return of its last page.

    Attributes:
        arrival: Number in the order of arrival at this engine; a retracted request keeps it.
        max_tokens: Length at which generation ends, prompt included.
        is_prompt_only: Ends with its first token, which another node continues from.
        token_ids: Prompt, then generated tokens.
        page_ids: In order; page i holds tokens i*page_size ... (i+1)*page_size-1.
        slot: Its row in `Slots` while it has pages; -1 otherwise.
        num_computed: Tokens whose KV is computed or being computed.
        num_collected: Tokens whose KV is computed: the forward that did it was collected.
        num_cached: Prompt tokens found in the prefix cache at first.
        from_tiers: Tokens of its prompt that tiers brought into the cache for it, by tier.
        is_counted: Whether these were counted.
        told_until: Prompt positions before this one have had their log-probabilities told.
        is_released: Nobody reads the pages of this prompt-only request any more.
        num_granted: How many pages at `granted_from` a remote writer may write.
        num_pushable: Pages at the front that launched forwards complete.
        num_launched: Forwards under way that hold a row of it.
        held_by: A running request that computes the next page of this one's prompt; worth waiting.
        frontier: Name of the first page of its prompt that it computes and others may wait for.
        blocked_at: State of the pages when they did not suffice; -1 when not tried.
        seen: What penalties count; None when there are none.
        compiling: Of the grammar, until it is compiled.
        grammar: Where the answer is in its grammar; None when it has none, or not yet.
        owner: The role's record of the request, which holds the request; the engine never looks at it.
    """

    request: GenerateRequest
    arrival: int
    max_tokens: int
    seed: int
    is_prompt_only: bool = False
    stage: Stage = Stage.WAITING
    token_ids: list[int] = field(default_factory=list)
    page_ids: list[int] = field(default_factory=list)
    slot: int = -1
    num_computed: int = 0
    num_collected: int = 0
    num_cached: int = 0
    from_tiers: Mapping[str, int] | None = None
    is_counted: bool = False
    told_until: int = 0
    is_released: bool = False
    granted_from: int = 0
    num_granted: int = 0
    num_pushable: int = 0
    num_launched: int = 0
    held_by: "ActiveRequest | None" = None
    frontier: Key | None = None
    blocked_at: int = -1
    seen: Seen | None = None
    compiling: "Future[CompiledGrammar] | None" = None
    grammar: "GrammarState | None" = None
    owner: "weakref.ref[Any] | None" = None

    @property
    def num_prompt(self) -> int:
        """Number of prompt tokens of this attempt."""
        return len(self.request.prompt_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens that are known but whose KV is not computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def granted_pages(self) -> list[int]:
        """Pages a remote writer may write, in the order of the prompt."""
        return self.page_ids[self.granted_from : self.granted_from + self.num_granted]

    @property
    def output_ids(self) -> list[int]:
        """Generated tokens of all attempts."""
        return self.token_ids[self.num_prompt - self.request.num_prior_tokens :]

    @property
    def next_index(self) -> int:
        """Index of the next token, counted over all attempts."""
        return len(self.token_ids) - self.num_prompt + self.request.num_prior_tokens

    @property
    def is_begun(self) -> bool:
        """Whether a forward has computed, or computes, any of it."""
        is_computed = self.num_launched > 0 or self.num_collected > self.num_cached
        return is_computed or len(self.token_ids) > self.num_prompt

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: the smallest."""
        return (-self.request.priority, self.arrival)

    @property
    def is_ready(self) -> bool:
        """Whether all that its first step needs is there: its grammar, if it has one.

        Raises:
            TandemError: The grammar cannot be compiled; the sentence says why.
        """
        if self.compiling is not None and self.compiling.done():
            from tandem.engine.grammar import GrammarState

            self.grammar = GrammarState(self.compiling.result(), self.output_ids)
            self.compiling = None
        return self.compiling is None

    @property
    def is_held(self) -> bool:
        """Whether waiting for another request's prompt saves computing it twice."""
        return self.held_by is not None and self.held_by.frontier is not None

    @property
    def num_matchable(self) -> int:
        """Tokens at the front whose KV may come from the prefix cache.

        The last one is always computed, since its logits give the next token; so is what comes
        right before a prompt position whose log-probability is wanted.
        """
        wanted = self.request.logprobs
        if wanted is None or wanted.prompt_start < 0:
            return len(self.token_ids) - 1
        return min(max(wanted.prompt_start, 1), len(self.token_ids)) - 1

    def accept(self, token: int) -> None:
        """Append a sampled token.

        Raises:
            GrammarViolated: The grammar does not allow it here; it is not appended.
        """
        if self.grammar is not None:
            self.grammar.accept(token)
        self.token_ids.append(token)
        if self.seen is not None:
            self.seen.add(token)

    def finish_at(self, token: int, eos_token_ids: frozenset[int]) -> Finish | None:
        """Return why the generation ends with the token just accepted, if it does."""
        sampling = self.request.sampling
        if (token in eos_token_ids and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            return Finish(reason="stop", matched=token)
        return Finish(reason="length") if len(self.token_ids) >= self.max_tokens else None
