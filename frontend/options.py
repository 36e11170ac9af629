"""How one app of the frontend behaves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tandem.frontend.reply_parser import NO_FORMATS, ReplyFormats


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What a server proves itself with, as paths of PEM files.

    Attributes:
        certfile: Its certificate, and those between it and the authority.
        keyfile: The certificate's key; empty where `certfile` holds it too.
        ca_certs: Clients must show a certificate of one of these authorities; empty asks for none.
    """

    certfile: str
    keyfile: str = ""
    ca_certs: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """What the flags of `frontend/flags.py` say: the same for a router and for a node.

    Attributes:
        api_keys: Any of them opens every route of clients; with none everyone may come in.
        key_files: Where some of the keys were read from.
        max_body_bytes: Larger bodies are refused with 413. 32 MiB holds a million token ids
            of context four times over.
        request_timeout_s: What a request may take with all it generates; 0 is without end.
        cors_origins: Pages of these origins may use the server from a browser; `*` is any page.
        tls: None serves plain HTTP.
        traces_endpoint: Of a collector of OpenTelemetry's, whole; empty sends no traces.
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
        http: What flags say.
        incremental_streaming_output: Whether `/generate` streams deltas instead of all so far.
        idle_timeout_s: From connecting, or from the last answer, to the end of the next request's head:
            idle clients and those that send a head byte by byte are closed alike. As nginx.
        body_timeout_s: What the body of a request may take to come in. 60 s: nginx's limit between
            two reads; here it is one for all of them, so that no trickle stretches it.
        stall_timeout_s: A client that does not read its answer for so long is cut off. As nginx.
        health_timeout_s: How long `/health_generate` waits for its token.
        tokenizer_files: Returns the files to serve at `/tokenizer`, empty while unknown; None
            where there is no such route.
        reply_formats: In which the model writes its thoughts and its calls of tools.
        service: How this server is called in traces.
        operator_key: Opens every route, and alone those of operators; empty: see
            `frontend/operators.py`.
        open_paths: Besides those that need no key anywhere.
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
