"""The router's configuration: read in `__main__`, checked here, passed down frozen."""

import ssl
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from frontend.options import HttpOptions
from frontend.reply_parser import reply_formats
from frontend.tls import load_authorities
from telemetry.log import LogFormat
from wire.errors import ConfigInvalid

PolicyName = Literal["least_load", "round_robin", "random", "power_of_two"]

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
        is_whole = False
    if not is_whole:
        raise ConfigInvalid(
            f"{text!r} is not a node's URL: give http://HOST:PORT or https://HOST:PORT, an IPv6 "
            "host in brackets"
        )
    return text.rstrip("/")


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


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterConfig:
    """Everything `python -m router` can be told.

    Attributes:
        num_workers: Edge workers: processes that each serve HTTP, tokenize and detokenize. One
            carries thousands of tokens per second; more are for more cores.
        max_attempts: How often one request is tried before its client sees an error. Two deaths in
            the life of one request are rare; a request that kills nodes must not kill them all.
        local_prefill_threshold: Prompt tokens that a decode node may have to compute by itself at a time;
            0: none, and a cluster without a prefill node serves nobody. See docs/conditional.md.
        node_ca_certs: Authorities of nodes that speak HTTPS; empty takes the system's.
        tokenizer_dir: Read here instead of asked from the nodes.
        served_model_name: As clients name the model; empty takes the nodes' name.
        tool_call_parser: Name of the format of the model's calls of tools; empty leaves them text.
        reasoning_parser: Name of that of its thoughts, likewise.
        cluster_secret: Of `TANDEM_CLUSTER_KEY`; empty leaves links to nodes plain.
        ignored_flags: Accepted because people type them, and without meaning here; said once.
    """

    prefills: tuple[PrefillTarget, ...]
    decodes: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    num_workers: int = 1
    policy: PolicyName = "least_load"
    max_attempts: int = 3
    local_prefill_threshold: int = LOCAL_PREFILL_THRESHOLD
    node_ca_certs: str = ""
    http: HttpOptions = field(default_factory=HttpOptions)
    tokenizer_dir: str = ""
    served_model_name: str = ""
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    log_level: str = "info"
    log_format: LogFormat = "auto"
    cluster_secret: str = field(default="", repr=False)
    ignored_flags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.prefills or not self.decodes:
            raise ConfigInvalid("give at least one --prefill URL and one --decode URL")
        urls = [target.url for target in self.prefills] + list(self.decodes)
        if len(set(urls)) < len(urls):
            raise ConfigInvalid("each node is given once: two of the URLs are the same")
        if self.num_workers < 1 or self.max_attempts < 1:
            raise ConfigInvalid("--detokenizers and --max-attempts are at least 1")
        if self.local_prefill_threshold < 0:
            raise ConfigInvalid(
                f"--local-prefill-threshold is {self.local_prefill_threshold}: give 0, for never, or tokens"
            )
        if not 0 <= self.port <= 65535:
            raise ConfigInvalid(f"--port {self.port} is not between 0 and 65535")
        if self.node_ca_certs:
            self.node_tls()
        reply_formats(self.tool_call_parser, self.reasoning_parser)

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
