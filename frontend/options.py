"""How one app of the frontend behaves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from frontend.reply_parser import NO_FORMATS, ReplyFormats


@dataclass(frozen=True, slots=True)
class FrontendOptions:
    """Options of `create_app`.

    Attributes:
        api_keys: Any of them opens every route; with none everyone may come in.
        max_body_bytes: Larger bodies are refused with 413. 32 MiB holds a million token ids
            of context four times over.
        incremental_streaming_output: Whether `/generate` streams deltas instead of all so far.
        stall_timeout_s: A client that does not read its stream for so long is cut off.
        health_timeout_s: How long `/health_generate` waits for its token.
        tokenizer_files: Returns the files to serve at `/tokenizer`, empty while unknown; None
            where there is no such route.
        reply_formats: In which the model writes its thoughts and its calls of tools.
    """

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 1024 * 1024
    incremental_streaming_output: bool = False
    stall_timeout_s: float = 60.0
    health_timeout_s: float = 20.0
    tokenizer_files: Callable[[], Mapping[str, str]] | None = None
    reply_formats: ReplyFormats = NO_FORMATS
