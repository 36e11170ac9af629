"""The one line an engine process writes to standard output: what it became."""

import msgspec

from wire.errors import ErrorInfo


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
