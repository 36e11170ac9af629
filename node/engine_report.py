"""What an engine process and its parent tell each other, a line of JSON each.

```
 parent ── stdin:  NodeConfig, then Drain, Resume ... ──▶ engine       its end is the order to stop
 parent ◀── stdout: Ready or Failed, then Drained ... ─── engine
```
"""

import msgspec

from tandem.wire.errors import ErrorInfo


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine serves."""

    epoch: int
    engine_port: int
    bootstrap_port: int | None
    fingerprint: str
    context_length: int
    max_prompt_tokens: int
    vocab_size: int
    eos_token_ids: list[int]


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The engine could not start."""

    error: ErrorInfo


class Drained(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Nothing is left since the drain of this number."""

    number: int


class Drain(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take nothing new, and hand over what is left in `timeout_s`; answered by `Drained`.

    Attributes:
        number: Of the parent's choice, higher than those before.
    """

    number: int
    timeout_s: float


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take requests again."""


Order = Drain | Resume
Report = Ready | Failed | Drained
