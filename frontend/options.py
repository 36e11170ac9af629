"""Options of one app of the frontend."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tandem.frontend.reply_parser import NO_FORMATS, ReplyFormats


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """A server's certificate, as paths of PEM files.

    Attributes:
        certfile: The certificate, with those between it and the authority.
        keyfile: The certificate's key. Empty: `certfile` has it too.
        ca_certs: Clients must show a certificate of one of these authorities. Empty: they need none.
    """

    certfile: str
    keyfile: str = ""
    ca_certs: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """The flags of `frontend/flags.py`, the same for a router and for a node.

    Attributes:
        api_keys: Any of them opens every route of clients. Empty: no key is needed.
        key_files: The files that some of the keys came from.
        max_body_bytes: Larger bodies are rejected with 413. 32 MiB holds four million token ids.
        request_timeout_s: For a request and its generations. 0: no limit.
        cors_origins: Pages of these origins may use the server from a browser. `*`: any page.
        tls: None: plain HTTP.
        traces_endpoint: URL of an OpenTelemetry collector. Empty: no traces.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    key_files: tuple[str, ...] = ()
    max_body_bytes: int = 32 * 1024 * 1024
    request_timeout_s: float = 0.0
    cors_origins: tuple[str, ...] = ()
    tls: TlsFiles | None = None
    traces_endpoint: str = ""

    @property
    def scheme(self) -> str:
        """`https` or `http`."""
        return "http" if self.tls is None else "https"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendOptions:
    """Options of `create_app`.

    Attributes:
        incremental_streaming_output: Whether `/generate` streams deltas instead of all so far.
        idle_timeout_s: From connecting, or from the last answer, to the end of the next request's head.
            As nginx.
        body_timeout_s: For a whole body. nginx has 60 s between two reads, which a trickle stretches.
        stall_timeout_s: A client that does not read its answer for so long is cut off. As nginx.
        health_timeout_s: How long `/health_generate` waits for its token.
        tokenizer_files: Returns the files to serve at `/tokenizer`, empty while unknown. None: no such
            route.
        reply_formats: The formats of the model's thoughts and tool calls.
        service: This server's name in traces.
        operator_key: Opens every route, those of operators included.
        open_paths: More paths that need no key.
    """

    http: HttpOptions = HttpOptions()
    incremental_streaming_output: bool = False
    idle_timeout_s: float = 75.0
    body_timeout_s: float = 60.0
    stall_timeout_s: float = 60.0
    health_timeout_s: float = 20.0
    tokenizer_files: Callable[[], Mapping[str, str]] | None = None
    reply_formats: ReplyFormats = NO_FORMATS
    service: str = "tandem"
    operator_key: str = field(default="", repr=False)
    open_paths: frozenset[str] = frozenset()
