"""The router's configuration: read in `__main__`, checked here, passed down frozen."""

import math
import ssl
from dataclasses import dataclass, field, replace
from typing import Literal
from urllib.parse import urlsplit

from tandem.frontend.options import HttpOptions
from tandem.frontend.reply_parser import reply_formats
from tandem.frontend.tls import load_authorities
from tandem.router.admission import Limits
from tandem.router.key_limits import KeyLimit
from tandem.telemetry.log import LogFormat
from tandem.wire.errors import ConfigInvalid
from tandem.wire.heartbeat import Heartbeat, heartbeat_of

PolicyName = Literal[
    "least_load", "cache_aware", "session", "power_of_two", "round_robin", "random"
]

# With so many tokens in it a step of the embedded model takes as long as four with answers alone, and one of a
# large model on GPUs less than two: docs/conditional.md has the numbers.
LOCAL_PREFILL_THRESHOLD = 128


def node_url(text: str) -> str:
    """Return the URL of a node in its normal form, without a slash at the end.

    Raises:
        ConfigInvalid: It is not http://HOST:PORT or https://HOST:PORT.
    """
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
    """Where a prefill node is.

    Attributes:
        bootstrap_port: None takes the one the node tells.
    """

    url: str
    bootstrap_port: int | None = None


@dataclass(frozen=True, slots=True)
class DnsTarget:
    """A name of which every address is a node.

    Attributes:
        role: Empty to ask each node.
    """

    host: str
    port: int
    role: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesTarget:
    """Pods that are nodes.

    Attributes:
        api_url: Of the API server.
        namespace: Of the pods; empty takes that of the router's own pod.
        prefill_selector: Label selector of the prefill pods; empty where there are none to find.
        decode_selector: That of the decode pods.
        port: Where their HTTP is: a number, or the name of a port of a container.
        account_dir: With the files that Kubernetes gives to a pod: token, ca.crt, namespace.
    """

    api_url: str = ""
    namespace: str = ""
    prefill_selector: str = ""
    decode_selector: str = ""
    port: str = "http"
    account_dir: str = "/var/run/secrets/kubernetes.io/serviceaccount"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionConfig:
    """Who may start, and how many at once.

    Attributes:
        is_on: False starts every request at once and leaves all waiting to the nodes.
        max_in_flight: Requests of all edge workers at one node; 0: as many as the node says.
        limits: Of each edge worker's line.
        key_limits: Of this router, by key; see `key_limits.py`.
        num_workers: Edge workers that share all this.
    """

    is_on: bool = True
    max_in_flight: int = 0
    limits: Limits = field(default_factory=Limits)
    key_limits: dict[str, KeyLimit] = field(default_factory=dict)
    num_workers: int = 1

    def for_one_of(self, num_workers: int) -> "AdmissionConfig":
        """Return what one of several edge workers goes by: its share of what keys may use."""
        shares = {name: limit.divided(num_workers) for name, limit in self.key_limits.items()}
        return replace(self, key_limits=shares, num_workers=num_workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Everything `python -m tandem.router` can be told.

    Attributes:
        dns: Names to find more nodes by.
        kubernetes: How to find more nodes as pods; None does not.
        takes_announced: Nodes that announce themselves may be all there are.
        num_workers: Edge workers: processes that each serve HTTP, tokenize and detokenize. One
            carries thousands of tokens per second; more are for more cores.
        prefill_policy: How prefills are rated where it is not as `policy` says; empty is as it says.
        decode_policy: Likewise decodes.
        max_attempts: How often one request is tried before its client sees an error. Two deaths in
            the life of one request are rare; a request that kills nodes must not kill them all.
        node_wait_s: How long a request waits when a role has no node, as while its only one restarts.
        shutdown_delay_s: How long it goes on serving all that comes when it is told to stop, so that
            balancers hear of it first. None to wait for by default: what stands before it is not known.
        drain_timeout_s: How long running streams go on when the router is told to stop.
        heartbeat_interval_ms: See `Heartbeat`; the same on every node and router.
        local_prefill_threshold: Prompt tokens that a decode node may have to compute by itself at a time;
            0: none, and a cluster without a prefill node serves nobody. See docs/conditional.md.
        node_ca_certs: Authorities of nodes that speak HTTPS; empty takes the system's.
        tokenizer_dir: Read here instead of asked from the nodes.
        served_model_name: As clients name the model; empty takes the nodes' name.
        tool_call_parser: Name of the format of the model's calls of tools; empty leaves them text.
        reasoning_parser: Name of that of its thoughts, likewise.
        generation_config: Whether sampling defaults that nodes tell are taken (`auto`), or none.
        cluster_secret: Of `TANDEM_CLUSTER_KEY`; empty leaves links to nodes plain.
        ignored_flags: Accepted because people type them, and without meaning here; said once.
    """

    prefills: tuple[PrefillTarget, ...]
    decodes: tuple[str, ...]
    dns: tuple[DnsTarget, ...] = ()
    kubernetes: KubernetesTarget | None = None
    takes_announced: bool = False
    host: str = "127.0.0.1"
    port: int = 8000
    num_workers: int = 1
    policy: PolicyName = "least_load"
    prefill_policy: PolicyName | Literal[""] = ""
    decode_policy: PolicyName | Literal[""] = ""
    max_attempts: int = 3
    node_wait_s: float = 10.0
    shutdown_delay_s: float = 0.0
    drain_timeout_s: float = 30.0
    heartbeat_interval_ms: float = 500.0
    admission: AdmissionConfig = field(default_factory=AdmissionConfig)
    local_prefill_threshold: int = LOCAL_PREFILL_THRESHOLD
    node_ca_certs: str = ""
    http: HttpOptions = field(default_factory=HttpOptions)
    tokenizer_dir: str = ""
    served_model_name: str = ""
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    generation_config: Literal["auto", "none"] = "auto"
    log_level: str = "info"
    log_format: LogFormat = "auto"
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
        if self.num_workers < 1 or self.max_attempts < 1:
            raise ConfigInvalid("--detokenizers and --max-attempts are at least 1")
        if not (math.isfinite(self.node_wait_s) and self.node_wait_s >= 0):
            raise ConfigInvalid("--node-wait-s is at least 0")
        if not (math.isfinite(self.drain_timeout_s) and self.drain_timeout_s >= 0):
            raise ConfigInvalid("--drain-timeout-s is at least 0")
        if not (math.isfinite(self.shutdown_delay_s) and self.shutdown_delay_s >= 0):
            raise ConfigInvalid("--shutdown-delay-s is at least 0")
        if self.local_prefill_threshold < 0:
            raise ConfigInvalid(
                f"--local-prefill-threshold is {self.local_prefill_threshold}: give 0, for never, or tokens"
            )
        if self.admission.key_limits and not self.http.api_keys:
            raise ConfigInvalid(
                "--key-limits needs keys to limit: give --api-key or --api-key-file"
            )
        if not 0 <= self.port <= 65535:
            raise ConfigInvalid(f"--port {self.port} is not between 0 and 65535")
        heartbeat_of(self.heartbeat_interval_ms)
        if self.node_ca_certs:
            self.node_tls()
        reply_formats(self.tool_call_parser, self.reasoning_parser)

    @property
    def num_listed(self) -> int:
        """Nodes that are given by their URLs."""
        return len(self.prefills) + len(self.decodes)

    @property
    def heartbeat(self) -> Heartbeat:
        """The rhythm of the links to nodes."""
        return heartbeat_of(self.heartbeat_interval_ms)

    def node_tls(self) -> ssl.SSLContext | bool:
        """Return what https:// nodes are checked with; true for what the system trusts.

        Raises:
            ConfigInvalid: The authorities cannot be read.
        """
        if not self.node_ca_certs:
            return True
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        load_authorities(context, "--node-ca-certs", self.node_ca_certs)
        return context
