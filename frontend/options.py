"""How one app of the frontend behaves, and the flags of every server's HTTP."""

import ssl
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from tandem.frontend.chat_template import read_template
from tandem.frontend.reply_formats import REASONING_FORMATS, TOOL_FORMATS
from tandem.frontend.reply_parser import NO_FORMATS, ReplyFormats
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid
from tandem.wire.options import Flag

log = get_logger(__name__)

# Where collectors listen for OTLP over HTTP.
_TRACES_PATH = "/v1/traces"

TOOL_CALL_PARSER = Flag(
    "--tool-call-parser",
    metavar="NAME",
    help="format in which the model writes tool calls, which chats then return apart: "
    f"{', '.join(sorted(TOOL_FORMATS))} (default: calls stay text, unless tool_choice forces one)",
)
REASONING_PARSER = Flag(
    "--reasoning-parser",
    metavar="NAME",
    help="format in which the model writes its reasoning, returned as reasoning_content: "
    f"{', '.join(sorted(REASONING_FORMATS))} (default: it stays in the content)",
)
CHAT_TEMPLATE = Flag(
    "--chat-template",
    metavar="FILE",
    help="Jinja template of chats (default: the model's own)",
    parse=read_template,
)
GENERATION_CONFIG = Flag(
    "--generation-config",
    help="source of sampling parameters that a request leaves out: the model's generation_config.json "
    "(auto), or the API's defaults (none)",
)


def checked_endpoint(text: str) -> str:
    """Return where traces are sent, with its path. Empty: nowhere.

    Raises:
        ConfigInvalid: It is no such URL, or the packages are not there.
    """
    if not text:
        return ""
    if not _is_endpoint(text):
        raise ConfigInvalid(
            f"--otlp-traces-endpoint {text}: give http://HOST:4318, where the collector takes OTLP over HTTP"
        )
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401 -- whether it is there
    except ImportError as error:
        raise ConfigInvalid(
            "--otlp-traces-endpoint needs OpenTelemetry: pip install 'tandem-serve[opentelemetry]'"
        ) from error
    return text if urlsplit(text).path.strip("/") else text.rstrip("/") + _TRACES_PATH


def _is_endpoint(text: str) -> bool:
    try:
        parts = urlsplit(text)
        has_address = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, brackets that do not match
        return False
    return parts.scheme in {"http", "https"} and has_address


def _checked_keys(keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_checked_key("--api-key", key) for key in keys))


def _checked_key(flag: str, key: str) -> str:
    # What a header can carry as one word, whatever the client.
    if not key.isascii() or not key.isprintable() or " " in key or not key:
        raise ConfigInvalid(f"{flag}: a key is one word of printable ASCII characters")
    return key


def _checked_origins(origins: Sequence[str]) -> tuple[str, ...]:
    return tuple(map(_checked_origin, origins))


def _checked_origin(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_origin = parts.scheme in {"http", "https"} and f"{parts.scheme}://{parts.netloc}" == text
        is_whole = is_origin and bool(parts.hostname) and "@" not in text and (parts.port or 1) > 0
    except ValueError:  # a port that is no number, an unclosed bracket
        is_whole = False
    if text == "*" or is_whole:
        return text
    raise ConfigInvalid(
        f"--cors-allow-origin {text}: give https://HOST or https://HOST:PORT, without a path, or *"
    )


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """The paths of a server's PEM files.

    Attributes:
        certfile: The certificate, and those between it and the authority.
        keyfile: Empty where `certfile` holds the key too.
        ca_certs: Empty: clients need no certificate.
    """

    certfile: Annotated[
        str, Flag("--ssl-certfile", metavar="FILE", help="serve HTTPS with this certificate")
    ] = ""
    keyfile: Annotated[str, Flag("--ssl-keyfile", metavar="FILE", help="the certificate's key")] = (
        ""
    )
    ca_certs: Annotated[
        str,
        Flag(
            "--ssl-ca-certs",
            metavar="FILE",
            help="require client certificates of these authorities",
        ),
    ] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """The HTTP side of a router or a node.

    Attributes:
        api_keys: Any of them opens every route of clients; without one, no request needs a key.
        max_body_bytes: 32 MiB holds a million token ids of context four times over.
        cors_origins: Pages of these origins may use the server from a browser; `*` is any page.
    """

    api_keys: Annotated[
        tuple[str, ...],
        Flag(
            "--api-key",
            metavar="KEY",
            help="require one of these keys as a bearer token; may be repeated",
            parse=_checked_keys,
        ),
    ] = field(default=(), repr=False)
    key_files: Annotated[
        tuple[str, ...],
        Flag(
            "--api-key-file",
            metavar="FILE",
            help="file of keys, one a line, # begins a comment; may be repeated; `ps` shows no keys",
        ),
    ] = ()
    max_body_bytes: Annotated[
        int,
        Flag(
            "--max-body-bytes",
            "--max-payload-size",
            metavar="BYTES",
            ge=1,
            help="reject larger bodies with 413",
        ),
    ] = 32 * 1024 * 1024
    request_timeout_s: Annotated[
        float,
        Flag(
            "--request-timeout-s",
            "--request-timeout-secs",
            metavar="SECONDS",
            ge=0,
            help="limit of a request with all it generates, then 504; 0: none",
        ),
    ] = 0.0
    cors_origins: Annotated[
        tuple[str, ...],
        Flag(
            "--cors-allow-origin",
            metavar="ORIGIN",
            help="allow web pages of https://HOST[:PORT], or * for all; may be repeated",
            parse=_checked_origins,
        ),
    ] = ()
    traces_endpoint: Annotated[
        str,
        Flag(
            "--otlp-traces-endpoint",
            metavar="URL",
            help="send a trace of each request to this OpenTelemetry collector, such as "
            "http://127.0.0.1:4318",
            parse=checked_endpoint,
        ),
    ] = ""
    tls: TlsFiles | None = None

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


def with_files(options: HttpOptions) -> HttpOptions:
    """Return the options with the keys of their files, after a check of the certificates."""
    if (tls := options.tls) is not None:
        for flag, value in (("--ssl-keyfile", tls.keyfile), ("--ssl-ca-certs", tls.ca_certs)):
            if value and not tls.certfile:
                raise ConfigInvalid(f"{flag} needs --ssl-certfile")
        server_context(tls)
    keys = [*options.api_keys, *(key for path in options.key_files for key in _keys_in(path))]
    return replace(options, api_keys=tuple(dict.fromkeys(keys)))


def warn_of_exposed_keys(options: HttpOptions) -> None:
    """Log a warning for each file of keys that every user of the machine can read."""
    for path in options.key_files:
        if Path(path).stat().st_mode & stat.S_IROTH:
            log.warning("api_key_file.readable_by_all", path=path, action=f"chmod o-r {path}")


def _keys_in(path: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not text in UTF-8"
        raise ConfigInvalid(f"--api-key-file {path}: {reason}") from error
    stripped = [line.strip() for line in lines]
    keys = [line for line in stripped if line and not line.startswith("#")]
    if not keys:
        # Else a file that was emptied by mistake would open the server to everyone.
        raise ConfigInvalid(f"--api-key-file {path}: holds no key; write one on a line")
    return [_checked_key(f"--api-key-file {path}", key) for key in keys]


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return the context of a server: TLS 1.2 and above, as Python's defaults."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # Otherwise clients may choose HTTP/2, which the server does not have.
    context.set_alpn_protocols(["http/1.1"])
    _check_readable("--ssl-certfile", files.certfile)
    if files.keyfile:
        _check_readable("--ssl-keyfile", files.keyfile)
    try:
        # Without a password OpenSSL would ask for one on the terminal.
        context.load_cert_chain(files.certfile, files.keyfile or None, password="")
    except OSError as error:
        raise ConfigInvalid(_chain_sentence(files, error)) from error
    if files.ca_certs:
        load_authorities(context, "--ssl-ca-certs", files.ca_certs)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def load_authorities(context: ssl.SSLContext, flag: str, path: str) -> None:
    """Make `context` trust the certificates in a file."""
    _check_readable(flag, path)
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise ConfigInvalid(f"{flag} {path}: holds no certificates in PEM form") from error


def _check_readable(flag: str, path: str) -> None:
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise ConfigInvalid(f"{flag} {path}: {error.strerror}") from error


def _chain_sentence(files: TlsFiles, error: OSError) -> str:
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        return f"--ssl-keyfile {files.keyfile}: is not the key of {files.certfile}"
    return (
        f"--ssl-certfile {files.certfile}, --ssl-keyfile {files.keyfile or files.certfile}: need a "
        "certificate and its key, unencrypted and in PEM form"
    )
