"""The flags of every server's HTTP, the same for a router and for a node."""

import argparse
import math
import stat
from pathlib import Path
from urllib.parse import urlsplit

from tandem.frontend.options import HttpOptions, TlsFiles
from tandem.frontend.tls import server_context
from tandem.frontend.tracing import checked_endpoint
from tandem.telemetry.log import get_logger
from tandem.wire.errors import ConfigInvalid

log = get_logger(__name__)

_DEFAULTS = HttpOptions()


def add_http_flags(group: argparse._ActionsContainer) -> None:
    """Add the flags to a parser's group."""
    add = group.add_argument
    add(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help="clients must send one of these as a bearer token; may be repeated",
    )
    add(
        "--api-key-file",
        action="append",
        default=[],
        metavar="FILE",
        help="keys, one a line; # begins a comment; may be repeated; not seen by `ps`, unlike --api-key",
    )
    add(
        "--max-body-bytes",
        "--max-payload-size",
        type=int,
        default=_DEFAULTS.max_body_bytes,
        metavar="N",
        help="larger bodies are refused with 413 (default: %(default)s)",
    )
    add(
        "--request-timeout-s",
        "--request-timeout-secs",
        dest="request_timeout_s",
        type=float,
        default=_DEFAULTS.request_timeout_s,
        metavar="SECONDS",
        help="a request that takes longer, all it generates included, is ended with 504; 0: never "
        "(default: 0)",
    )
    add(
        "--cors-allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages of https://HOST[:PORT], or * for all, use the server; may be repeated",
    )
    add(
        "--otlp-traces-endpoint",
        default="",
        metavar="URL",
        help="send a trace of each request to this collector of OpenTelemetry's, such as "
        "http://127.0.0.1:4318 (docs/tracing.md)",
    )
    _add_tls_flags(group)


def add_generation_config_flag(group: argparse._ActionsContainer) -> None:
    """Add where the sampling defaults come from."""
    group.add_argument(
        "--generation-config",
        choices=["auto", "none"],
        default="auto",
        help="where sampling parameters come from that a request leaves out: the model's generation_config.json "
        "(auto), or the API alone (none) (default: auto)",
    )


def _add_tls_flags(group: argparse._ActionsContainer) -> None:
    add = group.add_argument
    add("--ssl-certfile", default="", metavar="FILE", help="serve HTTPS with this certificate")
    add("--ssl-keyfile", default="", metavar="FILE", help="the certificate's key")
    add(
        "--ssl-ca-certs",
        default="",
        metavar="FILE",
        help="clients must show a certificate of these authorities",
    )


def read_http(args: argparse.Namespace) -> HttpOptions:
    """Return what the flags say; reads the files they name.

    Raises:
        ConfigInvalid: A value or a file cannot work; the sentence says what to give.
    """
    if args.max_body_bytes < 1:
        raise ConfigInvalid(f"--max-body-bytes is {args.max_body_bytes}: give at least 1")
    if not 0 <= args.request_timeout_s < math.inf:
        raise ConfigInvalid(
            f"--request-timeout-s is {args.request_timeout_s:g}: give seconds, or 0 for no limit"
        )
    keys = [_checked_key("--api-key", key) for key in args.api_key]
    for path in args.api_key_file:
        keys += _keys_in(path)
    return HttpOptions(
        api_keys=tuple(dict.fromkeys(keys)),
        key_files=tuple(args.api_key_file),
        max_body_bytes=args.max_body_bytes,
        request_timeout_s=args.request_timeout_s,
        cors_origins=tuple(map(_checked_origin, args.cors_allow_origin)),
        tls=_checked_tls(args),
        traces_endpoint=checked_endpoint(args.otlp_traces_endpoint),
    )


def http_argv(args: argparse.Namespace) -> list[str]:
    """Return the flags that say the same to another process."""
    values = {
        "--api-key": args.api_key,
        "--api-key-file": args.api_key_file,
        "--max-body-bytes": [args.max_body_bytes],
        "--request-timeout-s": [args.request_timeout_s],
        "--cors-allow-origin": args.cors_allow_origin,
        "--otlp-traces-endpoint": [args.otlp_traces_endpoint],
        "--ssl-certfile": [args.ssl_certfile],
        "--ssl-keyfile": [args.ssl_keyfile],
        "--ssl-ca-certs": [args.ssl_ca_certs],
    }
    # With =, so that a value may begin with a dash.
    return [f"{flag}={value}" for flag, given in values.items() for value in given]


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


def _checked_key(flag: str, key: str) -> str:
    # What a header can carry as one word, whatever the client.
    if not key.isascii() or not key.isprintable() or " " in key or not key:
        raise ConfigInvalid(f"{flag}: a key is one word of printable ASCII characters")
    return key


def _checked_origin(text: str) -> str:
    if text == "*":
        return text
    try:
        parts = urlsplit(text)
        is_origin = parts.scheme in {"http", "https"} and f"{parts.scheme}://{parts.netloc}" == text
        is_whole = is_origin and bool(parts.hostname) and "@" not in text and (parts.port or 1) > 0
    except ValueError:  # a port that is no number, an unclosed bracket
        is_whole = False
    if not is_whole:
        raise ConfigInvalid(
            f"--cors-allow-origin {text}: give https://HOST or https://HOST:PORT, without a path, or *"
        )
    return text


def _checked_tls(args: argparse.Namespace) -> TlsFiles | None:
    if not args.ssl_certfile:
        for flag, value in (
            ("--ssl-keyfile", args.ssl_keyfile),
            ("--ssl-ca-certs", args.ssl_ca_certs),
        ):
            if value:
                raise ConfigInvalid(f"{flag} needs --ssl-certfile")
        return None
    files = TlsFiles(args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs)
    server_context(files)  # said now, by one process, in one sentence
    return files
