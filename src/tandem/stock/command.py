"""`tandem adopt`: runs the adapter next to one engine, for networks in which only its own host reaches it."""

import asyncio
import os
import signal
import socket
from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import uvloop

from tandem.frontend.http.server import listen
from tandem.router.config import engine_of, host_of, listed_url
from tandem.router.stock_options import StockOptions
from tandem.router.workers.adapter import AdapterStart, EngineTarget
from tandem.settings.flags import (
    HEARTBEAT,
    LOG_FORMAT,
    LOG_LEVEL,
    PORT,
    Flag,
    add_flags,
    read_flags,
)
from tandem.settings.parser import Parser
from tandem.stock.adapter import serve
from tandem.telemetry.log import LogFormat, configure, get_logger
from tandem.wire.channel import heartbeat_of
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hosts import HOST
from tandem.wire.keys import ChannelKey, cluster_key, is_loopback, warn_of_weak_secret

log = get_logger(__name__)

EXAMPLES = """\
examples:
  tandem adopt vllm+http://127.0.0.1:8000 --role prefill --host 0.0.0.0 --port 7000
  tandem lb --prefill http://p1:7000 --decode http://d1:7001

The adapter needs no memory of the model and no GPU. Both adapters of a pair must be reachable from each other.

More: docs/stock.md
"""


class AdoptConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of `tandem adopt`."""

    url: str
    role: Annotated[
        Literal["prefill", "decode"], Flag("--role", help="role of the engine in pairs")
    ] = "decode"
    host: Annotated[str, HOST] = "127.0.0.1"
    port: Annotated[int, PORT] = 7001
    is_insecure: Annotated[
        bool,
        Flag("--insecure", help="accept links without TANDEM_CLUSTER_KEY on a reachable --host"),
    ] = False
    heartbeat_interval_ms: Annotated[float, HEARTBEAT] = 500.0
    tokenizer_dir: Annotated[
        str,
        Flag(
            "--tokenizer",
            metavar="DIR",
            help="directory of the model's config.json and tokenizer files (default: the engine's --model)",
        ),
    ] = ""
    bootstrap_port: Annotated[
        int | None,
        Flag(
            "--bootstrap-port",
            metavar="PORT",
            ge=1,
            le=65535,
            help="bootstrap port of a prefill engine that has one (default: the engine's default)",
        ),
    ] = None
    engine: StockOptions = StockOptions()
    log_level: Annotated[str, LOG_LEVEL] = "info"
    log_format: Annotated[LogFormat, LOG_FORMAT] = "auto"


def build_parser() -> Parser:
    """Return the parser."""
    parser = Parser(
        "tandem adopt",
        description="Make a node of an unmodified engine, for a router elsewhere.",
        epilog=EXAMPLES,
    )
    parser.add_argument(
        "url",
        metavar="URL",
        help="URL of the engine: vllm+http://HOST:PORT or sglang+http://HOST:PORT",
    )
    add_flags(parser, AdoptConfig)
    return parser


def main(argv: Sequence[str]) -> int:
    """Run the command until a signal; return the exit status.

    Raises:
        ConfigInvalid: A value is invalid; the message says what to do.
    """
    args = build_parser().parse_args(argv)
    config = read_flags(AdoptConfig, args, url=listed_url(args.url))
    engine = engine_of(config.url)
    if not engine:
        raise ConfigInvalid(
            f"{config.url} is a node of Tandem: adopt vllm+http://HOST:PORT or sglang+http://HOST:PORT"
        )
    has_bootstrap = engine == "sglang" or config.engine.kv_connector == "mooncake"
    if (
        config.role == "prefill"
        and has_bootstrap
        and is_loopback(host_of(config.url))
        and not is_loopback(config.host)
    ):
        raise ConfigInvalid(
            f"{config.url}: decode's engine connects to the bootstrap server at this host; use the address by which other "
            "hosts reach it"
        )
    configure(config.log_level, config.log_format, role="adapter")
    heartbeat_of(config.heartbeat_interval_ms)
    warn_of_weak_secret(os.environ.get("TANDEM_CLUSTER_KEY", ""))
    key = cluster_key(config.host, is_insecure=config.is_insecure)
    target = EngineTarget(
        engine=engine,
        http_url=config.url.removeprefix(f"{engine}+"),
        role=config.role,
        bootstrap_port=config.bootstrap_port,
    )
    with listen(config.host, config.port) as sock:
        start = AdapterStart(
            targets=[target],
            socket_fd=sock.fileno(),
            heartbeat_interval_ms=config.heartbeat_interval_ms,
            tokenizer_dir=config.tokenizer_dir,
            options=config.engine,
            log_level=config.log_level,
            log_format=config.log_format,
        )
        log.info("adapter.listening", role=config.role, engine=config.url, port=config.port)
        uvloop.run(_serve_until_signal(start, sock, key))
    return 0


async def _serve_until_signal(
    start: AdapterStart, sock: socket.socket, key: ChannelKey | None
) -> None:
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopping.set)
    await serve(start, sock, key, stopping)
