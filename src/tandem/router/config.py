"""The router's configuration: read from the command line, validated here and passed down unchanged."""

import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from tandem.frontend.options import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    REASONING_PARSER,
    TOOL_CALL_PARSER,
    HttpOptions,
    load_authorities,
    served_names,
)
from tandem.frontend.replies.parser import formats_by_model
from tandem.router.stock_options import StockOptions
from tandem.settings.flags import HEARTBEAT, LOG_FORMAT, LOG_LEVEL, PORT, Flag
from tandem.telemetry.log import LogFormat
from tandem.wire.channel import Heartbeat, heartbeat_of
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hosts import HOST

PolicyName = Literal[
    "least_load", "cache_aware", "session", "power_of_two", "round_robin", "random"
]

# Other routers' names for these policies.
POLICY_ALIASES = {
    "consistent_hash": "session",
    "consistent_hashing": "session",
    "manual": "session",
}
# Engines of whose URLs the adapter makes nodes; see `workers/adapter.py`.
ADOPTED = ("vllm", "sglang")
# With 1, decode computes only prompts of which it has cached all tokens but the last. 0 is not the default, because
# requests would then fail while no prefill node is up.
LOCAL_PREFILL_THRESHOLD = 1


def node_url(text: str) -> str:
    """Return a node's URL in normal form, without a trailing slash. Raises `ConfigInvalid`."""
    try:
        parts = urlsplit(text)
        # Resolving a host name also encodes it: a bad name must fail here, not while serving.
        host = (parts.hostname or "").encode("idna")
        is_complete = parts.scheme in {"http", "https"} and bool(host) and parts.port is not None
    except ValueError:  # a port that is not a number, an unclosed bracket, an invalid host name
        parts, is_complete = urlsplit(""), False
    if not is_complete or "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigInvalid(
            f"{text!r} is not a node's URL: use http://HOST:PORT or https://HOST:PORT, with an IPv6 "
            "host in brackets"
        )
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"


def listed_url(text: str) -> str:
    """Return a URL of `--prefill` or `--decode`: of a node, or of an engine in normal form. Raises `ConfigInvalid`."""
    engine, has_engine, url = text.partition("+")
    if not has_engine or "/" in engine:
        return node_url(text)
    if engine not in ADOPTED:
        names = ", ".join(ADOPTED)
        raise ConfigInvalid(
            f"{text}: there is no adapter for {engine!r}; use one of {names}, or http:// for a node of Tandem"
        )
    url = node_url(url)
    if urlsplit(url).path:
        raise ConfigInvalid(
            f"{text}: the URL of an engine has no path; use {engine}+http://HOST:PORT"
        )
    return f"{engine}+{url}"


def engine_of(url: str) -> str:
    """Return the engine's name in a URL such as `vllm+http://HOST:PORT`; empty for a node's URL."""
    return url.partition("://")[0].rpartition("+")[0]


def node_id(url: str) -> str:
    """Return the id of a node: its URL in the form of `node_url`, without the scheme."""
    return url.partition("://")[2]


def host_of(url: str) -> str:
    """Return the host of a node's URL; an IPv6 host without brackets."""
    return urlsplit(url).hostname or ""


@dataclass(frozen=True, slots=True)
class PrefillTarget:
    """Address of a prefill node. If no bootstrap port is set, the port that the node reports is used."""

    url: str
    bootstrap_port: int | None = None


@dataclass(frozen=True, slots=True)
class DnsTarget:
    """A DNS name whose addresses are all nodes. If no role is set, each node reports its own."""

    host: str
    port: int
    role: str = ""


def prefill_targets(groups: Iterable[Sequence[str]]) -> tuple[PrefillTarget, ...]:
    """Parse the values of each `--prefill`: URLs, each optionally followed by a bootstrap port or `none`."""
    targets: list[PrefillTarget] = []
    for group in groups:
        url: str | None = None
        for text in group:
            if "://" in text or not (text.isdigit() or text.lower() == "none"):
                url = listed_url(text)
                targets.append(PrefillTarget(url))
            elif url is None:
                raise ConfigInvalid(f"--prefill {text}: put a bootstrap port after its URL")
            else:
                targets[-1], url = PrefillTarget(url, _bootstrap_port(text)), None
    return tuple(targets)


def _bootstrap_port(text: str) -> int | None:
    if text.lower() == "none":
        return None
    if text.isdigit() and 0 < int(text) < 65536:
        return int(text)
    raise ConfigInvalid(f"bootstrap port {text!r} is invalid: use 1 to 65535, or `none`")


def read_bootstrap_ports(groups: Iterable[Sequence[str]]) -> tuple[int | None, ...]:
    """Parse the values of `--prefill-bootstrap-ports`. Raises `ConfigInvalid`."""
    return tuple(_bootstrap_port(text) for group in groups for text in group)


def dns_targets(groups: Iterable[Sequence[str]]) -> tuple[DnsTarget, ...]:
    """Parse the values of `--discover-dns`. Raises `ConfigInvalid`."""
    return tuple(dict.fromkeys(_dns_target(text) for group in groups for text in group))


def _dns_target(text: str) -> DnsTarget:
    role, has_role, name = text.rpartition("=")
    host, _, port = name.rpartition(":")
    invalid = ConfigInvalid(
        f"--discover-dns {text} is invalid: use prefill=HOST:PORT, decode=HOST:PORT, or HOST:PORT if nodes "
        "report their role",
        topic="docs/membership.md#dns",
    )
    if has_role and role not in ("prefill", "decode"):
        raise invalid
    try:
        node_url(f"http://{name}")
    except ConfigInvalid:
        raise invalid from None
    return DnsTarget(host, int(port), role)


def _for_each_model(flag: Flag) -> Flag:
    """Return a flag whose value is for all models, or for one of them."""
    text, default = flag.help.split(" (default: ")
    text += "; MODEL=NAME sets it for one of several models; may be repeated"
    return Flag(*flag.names, metavar="[MODEL=]NAME", help=f"{text} (default: {default}")


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of one edge worker's queue."""

    # The default length of a node's queue.
    max_requests: Annotated[
        int,
        Flag(
            "--max-queued-requests",
            metavar="N",
            ge=0,
            help="most requests that wait in one edge worker; further requests are rejected with 429",
        ),
    ] = 4096
    # 300 MB of memory.
    max_tokens: Annotated[
        int,
        Flag(
            "--max-queued-tokens",
            metavar="TOKENS",
            ge=0,
            help="most prompt tokens of all waiting requests; each takes 36 bytes of memory",
        ),
    ] = 8 * 1024 * 1024
    # Common proxies and load balancers drop a request whose response has not started by then.
    max_wait_s: Annotated[
        float,
        Flag(
            "--max-queue-wait-s",
            metavar="SECONDS",
            ge=0,
            help="reject a request with 429 after it has waited this long",
        ),
    ] = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """How many requests may start. The `num_workers` edge workers share these limits."""

    max_in_flight: Annotated[
        int,
        Flag(
            "--max-in-flight",
            group="admission",
            metavar="N",
            ge=0,
            help="most requests in flight at one node; others wait in the router (0: as many as the node can "
            "run)",
        ),
    ] = 0
    limits: QueueLimits = field(default_factory=QueueLimits)
    key_limits: Annotated[
        str,
        Flag(
            "--key-limits",
            metavar="FILE",
            help="TOML file with limits for each API key, read again when it changes; see docs/admission.md",
        ),
    ] = ""
    is_on: Annotated[
        bool,
        Flag(
            "--no-admission",
            help="start every request immediately: requests queue only at the nodes",
        ),
    ] = True
    num_workers: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """All options of `tandem lb`.

    Attributes:
        bootstrap_ports: Ports of `prefills`, in the same order; `arguments.parse` moves them into `prefills`.
        cluster_secret: Value of `TANDEM_CLUSTER_KEY`; empty: links to nodes are not encrypted.
        ignored_flags: Flags on the command line that have no effect here.
    """

    prefills: Annotated[
        tuple[PrefillTarget, ...],
        Flag(
            "--prefill",
            group="nodes",
            metavar="URL|PORT",
            nargs="+",
            help="URLs of prefill nodes, each optionally followed by a bootstrap port or `none`; vllm+http://HOST:PORT "
            "or sglang+http://HOST:PORT for unmodified engines; may be repeated",
            parse=prefill_targets,
        ),
    ] = ()
    bootstrap_ports: Annotated[
        tuple[int | None, ...],
        Flag(
            "--prefill-bootstrap-ports",
            metavar="PORT",
            nargs="+",
            help="bootstrap ports, in the order of the prefill nodes (default: each node reports its own)",
            parse=read_bootstrap_ports,
        ),
    ] = ()
    decodes: Annotated[
        tuple[str, ...],
        Flag(
            "--decode",
            metavar="URL",
            nargs="+",
            help="URLs of decode nodes; vllm+http and sglang+http as for --prefill; may be repeated",
            parse=lambda groups: tuple(listed_url(text) for group in groups for text in group),
        ),
    ] = ()
    policy: Annotated[
        PolicyName,
        Flag(
            "--policy",
            group="pairing",
            metavar="NAME",
            help=f"policy that chooses a pair: {', '.join(get_args(PolicyName))}; cache_aware sends a prompt to "
            "the node that caches its prefix, session sends each X-Session-Id to one pair",
            synonyms=POLICY_ALIASES,
        ),
    ] = "least_load"
    prefill_policy: Annotated[
        PolicyName | Literal[""],
        Flag(
            "--prefill-policy",
            metavar="NAME",
            help="policy that chooses the prefill node (default: --policy)",
            synonyms=POLICY_ALIASES,
        ),
    ] = ""
    decode_policy: Annotated[
        PolicyName | Literal[""],
        Flag(
            "--decode-policy",
            metavar="NAME",
            help="policy that chooses the decode node (default: --policy)",
            synonyms=POLICY_ALIASES,
        ),
    ] = ""
    local_prefill_threshold: Annotated[
        int,
        Flag(
            "--local-prefill-threshold",
            metavar="TOKENS",
            ge=0,
            help="most uncached prompt tokens, the node's backlog included, with which a decode node computes a "
            "prompt itself; without a prefill node it computes every prompt; 0: never",
        ),
    ] = LOCAL_PREFILL_THRESHOLD
    # Enough for two node failures during one request, which are rare. Few enough that a request that crashes nodes
    # does not crash all of them.
    max_attempts: Annotated[
        int,
        Flag(
            "--max-attempts",
            metavar="N",
            ge=1,
            help="most attempts at one request when nodes fail during it",
        ),
    ] = 3
    replay_sampled: Annotated[
        Literal["allow", "refuse"],
        Flag(
            "--replay-sampled",
            metavar="RULE",
            help="answers that a node continues with other random draws (unmodified engines): allow notes it in the "
            "answer, refuse ends the answer with the reason abort",
        ),
    ] = "allow"
    node_wait_s: Annotated[
        float,
        Flag(
            "--node-wait-s",
            metavar="SECONDS",
            ge=0,
            help="time that requests wait while a role has no node, for example while its only node restarts; "
            "0: reject them immediately",
        ),
    ] = 10.0
    node_ca_certs: Annotated[
        str,
        Flag(
            "--node-ca-certs",
            metavar="FILE",
            help="CA certificates for https:// nodes (default: those of the system)",
        ),
    ] = ""
    engines: StockOptions = field(default_factory=StockOptions)
    discovers_announced: Annotated[
        bool,
        Flag(
            "--discover-announced",
            group="service discovery",
            help="start without nodes and wait until nodes announce themselves or are added with POST "
            "/nodes; both also work without this flag",
        ),
    ] = False
    dns: Annotated[
        tuple[DnsTarget, ...],
        Flag(
            "--discover-dns",
            metavar="[ROLE=]HOST:PORT",
            nargs="+",
            help="use every address of this DNS name as a node, such as prefill=prefill.tandem:7000; without a "
            "role, each node reports its own; may be repeated",
            parse=dns_targets,
        ),
    ] = ()
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    host: Annotated[str, HOST] = "127.0.0.1"
    port: Annotated[int, PORT] = 8000
    num_workers: Annotated[
        int,
        Flag(
            "--workers",
            "--detokenizers",
            "--detokenizer-worker-num",
            "--tokenizer-worker-num",
            metavar="N",
            ge=1,
            help="processes for HTTP, tokenizing and detokenizing; raise it when one process keeps a core busy "
            "and other cores are idle",
        ),
    ] = 1
    shutdown_delay_s: Annotated[
        float,
        Flag(
            "--shutdown-delay-s",
            metavar="SECONDS",
            ge=0,
            help="after SIGTERM, time in which /health answers 503 but new requests are still served, so that load "
            "balancers remove this router first",
        ),
    ] = 0.0
    drain_timeout_s: Annotated[
        float,
        Flag(
            "--drain-timeout-s",
            metavar="SECONDS",
            ge=0,
            help="after SIGTERM, time in which running streams may finish; after Ctrl-C at most 3 s",
        ),
    ] = 30.0
    heartbeat_interval_ms: Annotated[float, HEARTBEAT] = 500.0
    http: HttpOptions = field(default_factory=HttpOptions)
    log_level: Annotated[str, LOG_LEVEL] = "info"
    log_format: Annotated[LogFormat, LOG_FORMAT] = "auto"
    served_model_names: Annotated[
        tuple[str, ...],
        Flag(
            "--served-model-name",
            group="model",
            metavar="NAME",
            nargs="+",
            help="model name that clients see, and more names that they may use; the router then serves one model "
            "(default: the names that nodes report)",
            parse=served_names,
        ),
    ] = ()
    tokenizer_dir: Annotated[
        str,
        Flag(
            "--tokenizer",
            "--tokenizer-path",
            "--model-path",
            metavar="DIR",
            help="directory of the tokenizer, and for unmodified engines of the model's config.json; needs transformers "
            "(default: use the nodes' tokenizer)",
        ),
    ] = ""
    chat_template: Annotated[str, CHAT_TEMPLATE] = ""
    tool_call_parsers: Annotated[tuple[str, ...], _for_each_model(TOOL_CALL_PARSER)] = ()
    reasoning_parsers: Annotated[tuple[str, ...], _for_each_model(REASONING_PARSER)] = ()
    generation_config: Annotated[Literal["auto", "none"], GENERATION_CONFIG] = "auto"
    cluster_secret: str = field(default="", repr=False)
    ignored_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        has_source = bool(self.dns) or self.discovers_announced
        if not has_source and not (self.prefills and self.decodes):
            raise ConfigInvalid(
                "no nodes: pass at least one --prefill URL and one --decode URL, or a source of nodes: "
                "--discover-dns or --discover-announced",
                topic="docs/membership.md",
            )
        urls = [target.url for target in self.prefills] + list(self.decodes)
        if len(set(urls)) < len(urls):
            raise ConfigInvalid("two nodes have the same URL: pass each node once")
        if self.admission.key_limits and not self.http.has_keys:
            raise ConfigInvalid(
                "--key-limits needs API keys: set --api-key or --api-key-file as well"
            )
        heartbeat_of(self.heartbeat_interval_ms)
        if self.node_ca_certs:
            self.node_tls()
        formats_by_model(self.tool_call_parsers, self.reasoning_parsers)

    @property
    def is_one_model(self) -> bool:
        """Whether it describes the model, so that nodes of a different one are not used."""
        return bool(self.served_model_names or self.tokenizer_dir or self.chat_template)

    @property
    def heartbeat(self) -> Heartbeat:
        """Heartbeat of the links to nodes."""
        return heartbeat_of(self.heartbeat_interval_ms)

    def node_tls(self) -> ssl.SSLContext | bool:
        """Return the TLS context that verifies https:// nodes; True for the system's authorities."""
        if not self.node_ca_certs:
            return True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        load_authorities(context, "--node-ca-certs", self.node_ca_certs)
        return context
