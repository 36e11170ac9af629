"""One request as an engine knows it.

```
 WAITING ──admitted──▶ RUNNING ──last token, cancel──▶ ENDED          colocated
 WAITING ──admitted──▶ RUNNING ──first token, cancel──▶ ENDED         prefill: pages stay until release
 RESERVED ──landed──▶ RUNNING ──last token, cancel──▶ ENDED           decode
```
"""

from dataclasses import dataclass, field
from enum import Enum

from wire.messages import Finish, GenerateRequest


class Stage(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RESERVED = "reserved"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request between admission and the return of its last page.

    Attributes:
        token_ids: Prompt, then generated tokens.
        num_computed: Tokens whose KV is in the pages.
        max_tokens: Length at which generation ends, prompt included.
        page_ids: In order; page i holds tokens i*page_size ... (i+1)*page_size-1.
        num_granted: How many pages at `granted_from` a remote writer may write.
        num_pushable: Pages already reported as complete by `Engine.step`.
        is_prompt_only: Ends with its first token, which another node continues from.
    """

    request: GenerateRequest
    max_tokens: int
    is_prompt_only: bool = False
    stage: Stage = Stage.WAITING
    token_ids: list[int] = field(default_factory=list)
    page_ids: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_cached: int = 0
    granted_from: int = 0
    num_granted: int = 0
    num_pushable: int = 0
    seed: int = 0

    @property
    def num_prompt(self) -> int:
        """Number of prompt tokens of this attempt."""
        return len(self.request.prompt_ids)

    @property
    def num_uncomputed(self) -> int:
        """Tokens that are known but whose KV is not computed: 1 while decoding."""
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

    def accept(self, token: int, eos_token_ids: frozenset[int]) -> Finish | None:
        """Append a sampled token; return why the generation ends with it, if it does."""
        index = self.next_index
        self.token_ids.append(token)
        sampling = self.request.sampling
        is_eos = token in eos_token_ids and not sampling.ignore_eos
        if is_eos or token in sampling.stop_token_ids:
            return Finish(reason="stop", matched=token)
        if index + 1 >= sampling.max_new_tokens or len(self.token_ids) >= self.max_tokens:
            return Finish(reason="length")
        return None
