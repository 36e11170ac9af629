"""The router's configuration: read in `__main__`, checked here, passed down frozen."""

import ssl
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, get_args
from urllib.parse import urlsplit

from tandem.frontend.options import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    REASONING_PARSER,
    TOOL_CALL_PARSER,
    HttpOptions,
    load_authorities,
)
from tandem.frontend.reply_parser import reply_formats
from tandem.router.key_limits import KeyLimit, read_limits
from tandem.telemetry.log import LogFormat
from tandem.wire.channel import Heartbeat, heartbeat_of
from tandem.wire.errors import ConfigInvalid
from tandem.wire.options import HEARTBEAT, HOST, LOG_FORMAT, LOG_LEVEL, PORT, Flag

PolicyName = Literal[
    "least_load", "cache_aware", "session", "power_of_two", "round_robin", "random"
]

# Names that other routers have for policies.
POLICY_ALIASES = {
    "consistent_hash": "session",
    "consistent_hashing": "session",
    "manual": "session",
}
# With so many tokens in it a step of the embedded model takes as long as four with answers alone, and one of a
# large model on GPUs less than two: docs/policies.md has the numbers.
LOCAL_PREFILL_THRESHOLD = 128


def node_url(text: str) -> str:
    """Return the URL of a node in its normal form, without a slash at the end. Raises `ConfigInvalid`."""
    try:
        parts = urlsplit(text)
        # As the resolver does, which would raise in the middle of serving.
        host = (parts.hostname or "").encode("idna")
        is_whole = parts.scheme in {"http", "https"} and bool(host) and parts.port is not None
    except ValueError:  # a port that is no number, an unclosed bracket, no name of a host
        parts, is_whole = urlsplit(""), False
    if not is_whole or "@" in parts.netloc or parts.query or parts.fragment:
        raise ConfigInvalid(
            f"{text!r} is not a node's URL: give http://HOST:PORT or https://HOST:PORT, an IPv6 "
            "host in brackets"
        )
    return f"{parts.scheme}://{parts.netloc.lower()}{parts.path.rstrip('/')}"


def node_id(url: str) -> str:
    """Return how people name a node: its URL, as `node_url` returns it, without the scheme."""
    return url.partition("://")[2]


def host_of(url: str) -> str:
    """Return the host of a node's URL, an IPv6 one without brackets."""
    return urlsplit(url).hostname or ""


@dataclass(frozen=True, slots=True)
class PrefillTarget:
    """Where a prefill node is. Without a bootstrap port the node reports its own."""

    url: str
    bootstrap_port: int | None = None


@dataclass(frozen=True, slots=True)
class DnsTarget:
    """A name of which every address is a node. Without a role each node is asked."""

    host: str
    port: int
    role: str = ""


def prefill_targets(groups: Iterable[Sequence[str]]) -> tuple[PrefillTarget, ...]:
    """Read what followed each `--prefill`: URLs, each with a bootstrap port or `none` behind it."""
    targets: list[PrefillTarget] = []
    for group in groups:
        url: str | None = None
        for text in group:
            if "://" in text or not (text.isdigit() or text.lower() == "none"):
                url = node_url(text)
                targets.append(PrefillTarget(url))
            elif url is None:
                raise ConfigInvalid(f"--prefill {text}: a bootstrap port follows the URL it is of")
            else:
                targets[-1], url = PrefillTarget(url, _bootstrap_port(text)), None
    return tuple(targets)


def _bootstrap_port(text: str) -> int | None:
    if text.lower() == "none":
        return None
    if text.isdigit() and 0 < int(text) < 65536:
        return int(text)
    raise ConfigInvalid(f"bootstrap port {text!r} is neither 1 to 65535 nor `none`")


def read_bootstrap_ports(groups: Iterable[Sequence[str]]) -> tuple[int | None, ...]:
    """Read `--prefill-bootstrap-ports`; raises `ConfigInvalid`."""
    return tuple(_bootstrap_port(text) for group in groups for text in group)


def dns_targets(groups: Iterable[Sequence[str]]) -> tuple[DnsTarget, ...]:
    """Read `--discover-dns`; raises `ConfigInvalid`."""
    return tuple(dict.fromkeys(_dns_target(text) for group in groups for text in group))


def _dns_target(text: str) -> DnsTarget:
    role, has_role, name = text.rpartition("=")
    host, _, port = name.rpartition(":")
    wrong = ConfigInvalid(
        f"--discover-dns {text}: give prefill=HOST:PORT, decode=HOST:PORT, or HOST:PORT to ask "
        "each node for its role",
        topic="membership#dns",
    )
    if has_role and role not in ("prefill", "decode"):
        raise wrong
    try:
        node_url(f"http://{name}")
    except ConfigInvalid:
        raise wrong from None
    return DnsTarget(host, int(port), role)


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesTarget:
    """Pods that are nodes. `account_dir` has the files that Kubernetes gives to a pod: token, ca.crt, namespace."""

    is_on: Annotated[
        bool,
        Flag(
            "--discover-kubernetes",
            group="service discovery",
            help="take pods with the labels below as nodes; the router's service account must be allowed to "
            "list pods",
        ),
    ] = False
    prefill_selector: Annotated[
        str,
        Flag(
            "--kubernetes-prefill-selector",
            metavar="LABELS",
            help="labels of prefill pods, such as app=tandem,role=prefill",
        ),
    ] = ""
    decode_selector: Annotated[
        str,
        Flag("--kubernetes-decode-selector", metavar="LABELS", help="labels of decode pods"),
    ] = ""
    namespace: Annotated[
        str,
        Flag(
            "--kubernetes-namespace",
            metavar="NAME",
            help="namespace of the pods (default: that of the router's own pod)",
        ),
    ] = ""
    port: Annotated[
        str,
        Flag(
            "--kubernetes-port",
            metavar="PORT",
            help="port of the pods' HTTP: a number, or its name in the pods",
        ),
    ] = "http"
    api_url: Annotated[
        str,
        Flag(
            "--kubernetes-api",
            metavar="URL",
            help="URL of the API (default: that of the router's own cluster); `kubectl proxy` gives one to "
            "a router outside",
        ),
    ] = ""
    account_dir: str = "/var/run/secrets/kubernetes.io/serviceaccount"


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one edge worker's queue."""

    # What a node's own queue has held.
    max_requests: Annotated[
        int,
        Flag(
            "--max-queued-requests",
            metavar="N",
            ge=0,
            help="requests that wait in one edge worker; more are rejected with 429",
        ),
    ] = 4096
    # 300 MB.
    max_tokens: Annotated[
        int,
        Flag(
            "--max-queued-tokens",
            metavar="TOKENS",
            ge=0,
            help="prompt tokens of all waiting requests, 36 bytes of memory each",
        ),
    ] = 8 * 1024 * 1024
    # Common proxies and load balancers give up an answer that has not begun by then.
    max_wait_s: Annotated[
        float,
        Flag(
            "--max-queue-wait-s",
            metavar="SECONDS",
            ge=0,
            help="reject a request that waited this long with 429",
        ),
    ] = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """Which requests start, and how many at once; `num_workers` edge workers share all this."""

    max_in_flight: Annotated[
        int,
        Flag(
            "--max-in-flight",
            group="admission",
            metavar="N",
            ge=0,
            help="requests at one node at once; the others wait in the router (0: as many as the node works "
            "on)",
        ),
    ] = 0
    limits: Limits = field(default_factory=Limits)
    key_limits: Annotated[
        dict[str, KeyLimit],
        Flag(
            "--key-limits",
            metavar="FILE",
            help="TOML file of limits for each API key; see `tandem docs admission`",
            parse=read_limits,
        ),
    ] = field(default_factory=dict)
    is_on: Annotated[
        bool,
        Flag(
            "--no-admission", help="start every request at once: requests queue at the nodes only"
        ),
    ] = True
    num_workers: int = 1

    def for_one_of(self, num_workers: int) -> "AdmissionConfig":
        """Return what one of several edge workers goes by: its share of what keys may use."""
        shares = {name: limit.divided(num_workers) for name, limit in self.key_limits.items()}
        return replace(self, key_limits=shares, num_workers=num_workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Everything `tandem lb` can be given.

    Attributes:
        bootstrap_ports: Of `prefills`, in their order; `arguments.parse` gives them to these.
        cluster_secret: Of `TANDEM_CLUSTER_KEY`; empty leaves links to nodes plain.
        ignored_flags: Accepted because people type them, and without meaning here.
    """

    prefills: Annotated[
        tuple[PrefillTarget, ...],
        Flag(
            "--prefill",
            group="nodes",
            metavar="URL|PORT",
            nargs="+",
            help="prefill nodes; a bootstrap port or `none` may follow each URL; may be repeated",
            parse=prefill_targets,
        ),
    ] = ()
    bootstrap_ports: Annotated[
        tuple[int | None, ...],
        Flag(
            "--prefill-bootstrap-ports",
            metavar="PORT",
            nargs="+",
            help="bootstrap ports, in the order of the prefills (default: each node reports its own)",
            parse=read_bootstrap_ports,
        ),
    ] = ()
    decodes: Annotated[
        tuple[str, ...],
        Flag(
            "--decode",
            metavar="URL",
            nargs="+",
            help="decode nodes; may be repeated",
            parse=lambda groups: tuple(node_url(text) for group in groups for text in group),
        ),
    ] = ()
    policy: Annotated[
        PolicyName,
        Flag(
            "--policy",
            group="pairing",
            metavar="NAME",
            help=f"how a pair is chosen: {', '.join(get_args(PolicyName))}; cache_aware sends a prompt to "
            "the node that caches its beginning, session sends each X-Session-Id to one pair",
            synonyms=POLICY_ALIASES,
        ),
    ] = "least_load"
    prefill_policy: Annotated[
        PolicyName | Literal[""],
        Flag(
            "--prefill-policy",
            metavar="NAME",
            help="how a prefill node is chosen (default: as --policy)",
            synonyms=POLICY_ALIASES,
        ),
    ] = ""
    decode_policy: Annotated[
        PolicyName | Literal[""],
        Flag(
            "--decode-policy",
            metavar="NAME",
            help="how a decode node is chosen (default: as --policy)",
            synonyms=POLICY_ALIASES,
        ),
    ] = ""
    local_prefill_threshold: Annotated[
        int,
        Flag(
            "--local-prefill-threshold",
            metavar="TOKENS",
            ge=0,
            help="a decode node computes a prompt itself while it then has at most this many uncached prompt "
            "tokens to compute, and any prompt while no prefill node is up; 0: never",
        ),
    ] = LOCAL_PREFILL_THRESHOLD
    # Two deaths in the life of one request are rare; a request that kills nodes must not kill them all.
    max_attempts: Annotated[
        int,
        Flag(
            "--max-attempts",
            metavar="N",
            ge=1,
            help="attempts of one request when nodes die during it",
        ),
    ] = 3
    node_wait_s: Annotated[
        float,
        Flag(
            "--node-wait-s",
            metavar="SECONDS",
            ge=0,
            help="time that requests wait when a role has no node, as while its only one restarts; 0 rejects "
            "them at once",
        ),
    ] = 10.0
    node_ca_certs: Annotated[
        str,
        Flag(
            "--node-ca-certs",
            metavar="FILE",
            help="authorities of the certificates of https:// nodes (default: the system's)",
        ),
    ] = ""
    takes_announced: Annotated[
        bool,
        Flag(
            "--discover-announced",
            group="service discovery",
            help="start without nodes, and wait for nodes that announce themselves or are added with POST "
            "/nodes; both also work without this flag",
        ),
    ] = False
    dns: Annotated[
        tuple[DnsTarget, ...],
        Flag(
            "--discover-dns",
            metavar="[ROLE=]HOST:PORT",
            nargs="+",
            help="take every address of this name as a node, such as prefill=prefill.tandem:7000; without a "
            "role, each node is asked; may be repeated",
            parse=dns_targets,
        ),
    ] = ()
    kubernetes: KubernetesTarget | None = None
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    host: Annotated[str, HOST] = "127.0.0.1"
    port: Annotated[int, PORT] = 8000
    num_workers: Annotated[
        int,
        Flag(
            "--detokenizers",
            "--detokenizer-worker-num",
            "--tokenizer-worker-num",
            metavar="N",
            ge=1,
            help="processes for HTTP, tokenizing and detokenizing; give more when one keeps a core busy and "
            "other cores are idle",
        ),
    ] = 1
    shutdown_delay_s: Annotated[
        float,
        Flag(
            "--shutdown-delay-s",
            metavar="SECONDS",
            ge=0,
            help="on SIGTERM, time that new requests are still served while /health is 503, so that load "
            "balancers remove this router first",
        ),
    ] = 0.0
    drain_timeout_s: Annotated[
        float,
        Flag(
            "--drain-timeout-s",
            metavar="SECONDS",
            ge=0,
            help="on SIGTERM, time that running streams have to finish; Ctrl-C gives them 3 s",
        ),
    ] = 30.0
    heartbeat_interval_ms: Annotated[float, HEARTBEAT] = 500.0
    http: HttpOptions = field(default_factory=HttpOptions)
    log_level: Annotated[str, LOG_LEVEL] = "info"
    log_format: Annotated[LogFormat, LOG_FORMAT] = "auto"
    served_model_name: Annotated[
        str,
        Flag(
            "--served-model-name",
            group="model",
            metavar="NAME",
            help="the model's name for clients (default: the one that nodes report)",
        ),
    ] = ""
    tokenizer_dir: Annotated[
        str,
        Flag(
            "--tokenizer",
            "--tokenizer-path",
            "--model-path",
            metavar="DIR",
            help="directory of the tokenizer (default: the nodes' tokenizer)",
        ),
    ] = ""
    chat_template: Annotated[str, CHAT_TEMPLATE] = ""
    tool_call_parser: Annotated[str, TOOL_CALL_PARSER] = ""
    reasoning_parser: Annotated[str, REASONING_PARSER] = ""
    generation_config: Annotated[Literal["auto", "none"], GENERATION_CONFIG] = "auto"
    cluster_secret: str = field(default="", repr=False)
    ignored_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        has_source = bool(self.dns) or self.kubernetes is not None or self.takes_announced
        if not has_source and not (self.prefills and self.decodes):
            raise ConfigInvalid(
                "give at least one --prefill URL and one --decode URL, or say where nodes come from: "
                "--discover-dns, --discover-kubernetes or --discover-announced",
                topic="membership",
            )
        urls = [target.url for target in self.prefills] + list(self.decodes)
        if len(set(urls)) < len(urls):
            raise ConfigInvalid("each node is given once: two of the URLs are the same")
        if self.admission.key_limits and not self.http.api_keys:
            raise ConfigInvalid(
                "--key-limits needs keys to limit: give --api-key or --api-key-file"
            )
        heartbeat_of(self.heartbeat_interval_ms)
        if self.node_ca_certs:
            self.node_tls()
        reply_formats(self.tool_call_parser, self.reasoning_parser)

    @property
    def heartbeat(self) -> Heartbeat:
        """The rhythm of the links to nodes."""
        return heartbeat_of(self.heartbeat_interval_ms)

    def node_tls(self) -> ssl.SSLContext | bool:
        """Return what https:// nodes are checked with; true for what the system trusts."""
        if not self.node_ca_certs:
            return True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        load_authorities(context, "--node-ca-certs", self.node_ca_certs)
        return context
