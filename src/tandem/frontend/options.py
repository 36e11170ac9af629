"""Options of one frontend app, and the HTTP flags that all servers share."""

import ssl
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from tandem.frontend.replies.parser import NO_FORMATS, ReplyFormats
from tandem.frontend.text.chat_template import read_template
from tandem.frontend.text.transcript import AUTO
from tandem.settings.flags import Flag
from tandem.settings.reload import ReloadedFiles
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hosts import bare_host

log = get_logger(__name__)

# The standard path of OTLP over HTTP.
_TRACES_PATH = "/v1/traces"

TOOL_CALL_PARSER = Flag(
    "--tool-call-parser",
    metavar="NAME",
    help="format of the model's tool calls, such as hermes (see docs/parsers.md), which chats return as tool_calls "
    "(default: calls stay in the content, unless tool_choice forces one)",
)
REASONING_PARSER = Flag(
    "--reasoning-parser",
    metavar="NAME",
    help="format of the model's reasoning, such as qwen3 (see docs/parsers.md), which chats return as reasoning_content "
    "(default: reasoning stays in the content)",
)


def served_names(groups: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Return the names in the values of each `--served-model-name`, without empty and repeated ones."""
    return tuple(dict.fromkeys(name for group in groups for name in group if name))


CHAT_TEMPLATE = Flag(
    "--chat-template",
    metavar="FILE",
    help="Jinja chat template (default: the model's own)",
    parse=read_template,
)
GENERATION_CONFIG = Flag(
    "--generation-config",
    help="source of default sampling parameters: the model's generation_config.json (auto), or the "
    "API's own defaults (none)",
)


def checked_endpoint(text: str) -> str:
    """Return the URL that receives traces, with its path. Empty: no traces are sent.

    Raises:
        ConfigInvalid: The URL is invalid, or OpenTelemetry is not installed.
    """
    if not text:
        return ""
    if not _is_endpoint(text):
        raise ConfigInvalid(
            f"--otlp-traces-endpoint {text}: invalid URL; set the collector's OTLP/HTTP endpoint, "
            "such as http://HOST:4318"
        )
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401 -- checks that it is installed
    except ImportError as error:
        raise ConfigInvalid(
            "--otlp-traces-endpoint needs OpenTelemetry: pip install 'tandem-serve[opentelemetry]'"
        ) from error
    return text if urlsplit(text).path.strip("/") else text.rstrip("/") + _TRACES_PATH


def _is_endpoint(text: str) -> bool:
    try:
        parts = urlsplit(text)
        has_address = bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is not a number, or unbalanced brackets
        return False
    return parts.scheme in {"http", "https"} and has_address


def _checked_keys(keys: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(_checked_key("--api-key", key) for key in keys))


def _checked_key(flag: str, key: str) -> str:
    # Every HTTP client can send printable ASCII without spaces in a header.
    if not key.isascii() or not key.isprintable() or " " in key or not key:
        raise ConfigInvalid(f"{flag}: a key must be printable ASCII characters without spaces")
    return key


def _checked_origins(origins: Sequence[str]) -> tuple[str, ...]:
    return tuple(map(_checked_origin, origins))


def _checked_origin(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_origin = parts.scheme in {"http", "https"} and f"{parts.scheme}://{parts.netloc}" == text
        is_valid = is_origin and bool(parts.hostname) and "@" not in text and (parts.port or 1) > 0
    except ValueError:  # a port that is not a number, or an unclosed bracket
        is_valid = False
    if text == "*" or is_valid:
        return text
    raise ConfigInvalid(
        f"--cors-allow-origin {text}: invalid origin; use https://HOST[:PORT] without a path, or *"
    )


def _checked_interval(text: str) -> str:
    if text == AUTO or (text.isascii() and text.isdigit() and int(text) >= 1):
        return text
    raise ConfigInvalid(
        f"--stream-interval {text}: must be a number of tokens, at least 1, or {AUTO}"
    )


def _checked_hosts(hosts: Sequence[str]) -> tuple[str, ...]:
    return tuple(bare_host("--allowed-host", host).lower() for host in hosts)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of a server's PEM files.

    Attributes:
        certfile: The certificate and its intermediate certificates.
        keyfile: The private key. Empty: `certfile` contains the key too.
        ca_certs: CA certificates that client certificates must chain to. Empty: clients need none.
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
            help="require client certificates issued by the CAs in this file",
        ),
    ] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """HTTP options of a router or a node.

    Attributes:
        api_keys: Each key opens every client route, as do those of `key_files`. Without any, no key is needed.
        max_body_bytes: 32 MiB is four times the size of a million token ids.
        cors_origins: Web origins whose pages may use the server. `*` allows every page.
        allowed_hosts: Names of this machine, besides its own, in `Host` headers. In lower case.
    """

    api_keys: Annotated[
        tuple[str, ...],
        Flag(
            "--api-key",
            metavar="KEY",
            help="require this key as a bearer token; may be repeated, any one key is accepted",
            parse=_checked_keys,
        ),
    ] = field(default=(), repr=False)
    key_files: Annotated[
        tuple[str, ...],
        Flag(
            "--api-key-file",
            metavar="FILE",
            help="file with one key per line and # comments, so that `ps` shows no keys; read again when it changes; may "
            "be repeated",
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
            help="cancel a request that takes longer and answer 504; 0: no limit",
        ),
    ] = 0.0
    cors_origins: Annotated[
        tuple[str, ...],
        Flag(
            "--cors-allow-origin",
            metavar="ORIGIN",
            help="allow web pages of this origin, https://HOST[:PORT], or * for all; may be repeated",
            parse=_checked_origins,
        ),
    ] = ()
    allowed_hosts: Annotated[
        tuple[str, ...],
        Flag(
            "--allowed-host",
            metavar="HOST",
            help="accept this name in the Host header of requests to a loopback address without API keys; may be "
            "repeated",
            parse=_checked_hosts,
        ),
    ] = ()
    access_log: Annotated[
        bool,
        Flag(
            "--access-log",
            help="log each HTTP request with its id, the name of its API key, its status and duration",
        ),
    ] = False
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
    stream_interval: Annotated[
        str,
        Flag(
            "--stream-interval",
            metavar="TOKENS",
            help="least number of tokens per streamed event, except the first and the last; auto: 1, or 2 while the process "
            "is busy",
            parse=_checked_interval,
        ),
    ] = "1"
    tls: TlsFiles | None = None

    @property
    def has_keys(self) -> bool:
        """Whether clients need a key."""
        return bool(self.api_keys or self.key_files)

    @property
    def scheme(self) -> str:
        """`https` or `http`."""
        return "http" if self.tls is None else "https"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendOptions:
    """Options of `create_app`.

    Attributes:
        incremental_streaming_output: Whether `/generate` streams deltas instead of the full text so far.
        idle_timeout_s: Time limit for the head of the next request, from the connection's start or
            its last answer. NGINX's default.
        body_timeout_s: Time limit for a complete body. NGINX limits only the time between two reads
            to 60 s, so a slow sender can take forever there.
        stall_timeout_s: Time after which a client that does not read its answer is disconnected.
            NGINX's default.
        health_timeout_s: How long `/health_generate` waits for a token.
        tokenizer_files: Returns the files for `/tokenizer`, empty while unknown. None: no such route.
        reply_formats: Formats of reasoning and tool calls, of models that `model_formats` does not name.
        service: Service name in traces.
        operator_key: Opens every route, operator routes included.
        max_priority: Returns the highest priority of a key's requests by the key's name. Higher priorities are
            lowered to it. Without API keys every priority is allowed.
        open_paths: Additional paths that need no key.
    """

    http: HttpOptions = HttpOptions()
    incremental_streaming_output: bool = False
    idle_timeout_s: float = 75.0
    body_timeout_s: float = 60.0
    stall_timeout_s: float = 60.0
    health_timeout_s: float = 20.0
    tokenizer_files: Callable[[], Mapping[str, str]] | None = None
    reply_formats: ReplyFormats = NO_FORMATS
    model_formats: Mapping[str, ReplyFormats] = field(default_factory=dict)
    service: str = "tandem"
    operator_key: str = field(default="", repr=False)
    max_priority: Callable[[str], int] = lambda _client: 0
    open_paths: frozenset[str] = frozenset()

    def formats_of(self, names: Iterable[str]) -> ReplyFormats:
        """Return the formats of the model that has these names."""
        found = (self.model_formats[name] for name in names if name in self.model_formats)
        return next(found, self.reply_formats)


def check_files(options: HttpOptions) -> HttpOptions:
    """Return the options if their files are valid. Raises `ConfigInvalid`."""
    if (tls := options.tls) is not None:
        for flag, value in (("--ssl-keyfile", tls.keyfile), ("--ssl-ca-certs", tls.ca_certs)):
            if value and not tls.certfile:
                raise ConfigInvalid(f"{flag} needs --ssl-certfile")
        server_context(tls)
    read_keys(options)
    return options


def read_keys(options: HttpOptions) -> tuple[str, ...]:
    """Return the API keys of the flags and of the key files. Raises `ConfigInvalid`."""
    keys = [*options.api_keys, *(key for path in options.key_files for key in _keys_in(path))]
    return tuple(dict.fromkeys(keys))


def warn_of_exposed_keys(options: HttpOptions) -> None:
    """Log a warning for each key file that every user of the machine can read."""
    for path in options.key_files:
        if Path(path).stat().st_mode & stat.S_IROTH:
            log.warning("api_key_file.readable_by_all", path=path, action=f"chmod o-r {path}")


def _keys_in(path: str) -> list[str]:
    if Path(path).is_fifo():
        raise ConfigInvalid(
            f"--api-key-file {path}: is a pipe, which cannot be read again; use a file"
        )
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
        raise ConfigInvalid(f"--api-key-file {path}: {reason}") from error
    stripped = [line.strip() for line in lines]
    keys = [line for line in stripped if line and not line.startswith("#")]
    if not keys:
        # Otherwise a file emptied by mistake would open the server to everyone.
        raise ConfigInvalid(f"--api-key-file {path}: contains no key; write one key per line")
    return [_checked_key(f"--api-key-file {path}", key) for key in keys]


class ServerTls:
    """A server's TLS. New connections use its files as they are now.

    Attributes:
        context: The context to serve with.
        files: To be refreshed by the owner.
    """

    def __init__(self, files: TlsFiles) -> None:
        self._files = files
        self.context = server_context(files)
        # OpenSSL calls this for every handshake, even if the client names no server.
        self.context.sni_callback = self._use_current
        paths = filter(None, (files.certfile, files.keyfile, files.ca_certs))
        self.files = ReloadedFiles(list(paths), self._load)

    def _load(self) -> None:
        self._current = server_context(self._files)

    def _use_current(
        self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        connection.context = self._current


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Return a server's TLS context with Python's defaults: TLS 1.2 and later."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    # Otherwise clients may negotiate HTTP/2, which the server does not support.
    context.set_alpn_protocols(["http/1.1"])
    _check_readable("--ssl-certfile", files.certfile)
    if files.keyfile:
        _check_readable("--ssl-keyfile", files.keyfile)
    try:
        # Without an explicit password OpenSSL prompts for one on the terminal.
        context.load_cert_chain(files.certfile, files.keyfile or None, password="")
    except OSError as error:
        raise ConfigInvalid(_chain_sentence(files, error)) from error
    if files.ca_certs:
        load_authorities(context, "--ssl-ca-certs", files.ca_certs)
        context.verify_mode = ssl.CERT_REQUIRED
        # No session resumption: it would skip the client's certificate, even if its CA is no longer accepted.
        context.options |= ssl.OP_NO_TICKET
        context.num_tickets = 0
    return context


def load_authorities(context: ssl.SSLContext, flag: str, path: str) -> None:
    """Make `context` trust the certificates in a file."""
    _check_readable(flag, path)
    try:
        context.load_verify_locations(path)
    except OSError as error:
        raise ConfigInvalid(f"{flag} {path}: contains no PEM certificates") from error


def _check_readable(flag: str, path: str) -> None:
    try:
        Path(path).read_bytes()
    except OSError as error:
        raise ConfigInvalid(f"{flag} {path}: {error.strerror}") from error


def _chain_sentence(files: TlsFiles, error: OSError) -> str:
    if getattr(error, "reason", None) == "KEY_VALUES_MISMATCH":
        return f"--ssl-keyfile {files.keyfile}: is not the key of {files.certfile}"
    return (
        f"--ssl-certfile {files.certfile}, --ssl-keyfile {files.keyfile or files.certfile}: cannot be "
        "loaded; use a certificate and its key, both PEM and unencrypted"
    )
