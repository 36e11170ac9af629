"""What a node is told before it starts: checked in `__main__`, frozen, passed down."""

from typing import Literal

import msgspec

from tandem.engine.config import EngineConfig
from tandem.frontend.options import HttpOptions
from tandem.kvtier.spec import parse_tiers
from tandem.kvtransfer.checksum import Verify
from tandem.kvtransfer.transports.registry import names_of
from tandem.wire.errors import ConfigInvalid
from tandem.wire.generation import SamplingDefaults
from tandem.wire.heartbeat import Heartbeat, heartbeat_of
from tandem.wire.keys import is_loopback

NodeRole = Literal["prefill", "decode", "colocated"]

# What a pod is given to end by default; one that drains should be given some seconds more.
DRAIN_TIMEOUT_S = 30.0
# Longer than any forward, and than what compiles at the first use of a size later on.
STEP_TIMEOUT_S = 300.0
MAX_STEP_S = 86_400.0
# A day: longer than any answer takes, so that more is a mistake.
MAX_DRAIN_S = 86_400.0


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How KV moves.

    Attributes:
        backend: A transport's name, or `auto` for the best that both ends offer.
        directory: What transport `file` shares with the other side; empty for none.
        interface: Name of the network interface that `tcp` uses; empty for the one of the host.
        bootstrap_port: Where a prefill listens for grants. 8998: SGLang's default.
        grant_timeout_s: How long prefill waits for a grant, decode's queue for pages included. A half
            whose edge worker is gone ends at once; this is for halves that nobody follows. 300 s:
            SGLang's default.
        early_grant_timeout_s: How long a grant waits for its request: its pages are idle meanwhile.
        landed_timeout_s: How long decode waits for the pages of a grant, prefill's queue included.
        push_granularity: Whether layers leave while a forward still runs, or chunks after theirs.
        verify: How many of the pages are hashed on both sides: `sample` finds a link that corrupts
            within a few prompts, at a sixteenth of the cost.
    """

    backend: str = "auto"
    directory: str = ""
    interface: str = ""
    bootstrap_port: int = 8998
    grant_timeout_s: float = 300.0
    early_grant_timeout_s: float = 30.0
    landed_timeout_s: float = 600.0
    push_granularity: Literal["layer", "chunk"] = "layer"
    verify: Verify = "sample"


class TierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What stands behind the prefix cache.

    Attributes:
        specs: As `--kv-tier` gave them, fastest first; see `tandem.kvtier.spec`.
        timeout_s: How long a request waits for them at most. 0.5: half of what SGLang waits, and more than
            a healthy store takes for some thousand tokens; what is not there by then is computed.
        min_tokens: Fewer missing ones are computed without a look. 256: SGLang's default.
        staging_bytes: Host memory that pages may take on their way. 2 GiB: either direction has room for
            8k tokens of an 8B model.
    """

    specs: tuple[str, ...] = ()
    timeout_s: float = 0.5
    min_tokens: int = 256
    staging_bytes: int = 2 << 30


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One node: an HTTP process and the engine process under it.

    Attributes:
        tiers: Behind its prefix cache.
        engine_port: Where edge workers reach the engine; 0 takes any free port, which
            `/server_info` tells them.
        zone: Where it stands: any name that nodes near each other share.
        tool_call_parser: Name of the format of the model's calls of tools; empty leaves them text.
        reasoning_parser: Name of that of its thoughts, likewise.
        default_sampling: What stands for parameters that a request leaves out.
        heartbeat_interval_ms: See `Heartbeat`; the same on every node and router.
        drain_timeout_s: How long requests may take to finish when the node is told to end, before the
            rest is handed over.
        step_timeout_s: How long one step of the engine may take before its process is ended.
        routers: URLs of routers that this node announces itself to.
        advertise_url: By which they reach it; empty for that of `host` and the port.
    """

    role: NodeRole
    served_model_name: str
    engine: EngineConfig
    transfer: TransferConfig = TransferConfig()
    tiers: TierConfig = TierConfig()
    host: str = "127.0.0.1"
    port: int = 7000
    engine_port: int = 0
    zone: str = ""
    http: HttpOptions = HttpOptions()
    is_incremental_output: bool = False
    tool_call_parser: str = ""
    reasoning_parser: str = ""
    default_sampling: SamplingDefaults = SamplingDefaults()
    log_level: str = "info"
    log_format: Literal["auto", "console", "json"] = "auto"
    is_insecure: bool = False
    drain_timeout_s: float = DRAIN_TIMEOUT_S
    step_timeout_s: float = STEP_TIMEOUT_S
    routers: tuple[str, ...] = ()
    advertise_url: str = ""
    heartbeat_interval_ms: float = 500.0

    @property
    def heartbeat(self) -> Heartbeat:
        """The rhythm of this node's links."""
        return heartbeat_of(self.heartbeat_interval_ms)


def check(config: NodeConfig) -> NodeConfig:
    """Return `config` if it can work.

    Raises:
        ConfigInvalid: Naming the flag and what to give.
    """
    heartbeat_of(config.heartbeat_interval_ms)
    engine = config.engine
    for flag, value, least in (
        ("--page-size", engine.page_size, 1),
        ("--chunked-prefill-size", engine.chunked_prefill_size, 1),
        ("--local-prefill-tokens", engine.local_prefill_tokens, 0),
        ("--max-running-requests", engine.max_running_requests, 1),
        ("--max-total-tokens", engine.max_total_tokens, 0),
        ("--context-length", engine.context_length, 0),
        ("--tp", engine.tp_size, 1),
        ("--port", config.port, 0),
        ("--bootstrap-port", config.transfer.bootstrap_port, 0),
        ("--kv-tier-timeout-ms", config.tiers.timeout_s * 1000, 1),
        ("--kv-tier-min-tokens", config.tiers.min_tokens, 0),
        ("--kv-tier-staging-mib", config.tiers.staging_bytes >> 20, 1),
    ):
        if value < least:
            raise ConfigInvalid(f"{flag} is {value:g}: give at least {least}")
    if not 0 <= config.drain_timeout_s <= MAX_DRAIN_S:
        raise ConfigInvalid(
            f"--drain-timeout-s is {config.drain_timeout_s:g}: give 0, which hands over at once, up to "
            f"{MAX_DRAIN_S:g}"
        )
    if not 1 <= config.step_timeout_s <= MAX_STEP_S:
        raise ConfigInvalid(
            f"--step-timeout-s is {config.step_timeout_s:g}: give 1 to {MAX_STEP_S:g}"
        )
    if max(config.port, config.transfer.bootstrap_port, config.engine_port) > 65535:
        raise ConfigInvalid("ports are at most 65535")
    if "file" in config.transfer.backend.split(",") and not config.transfer.directory:
        raise ConfigInvalid(
            "--transfer-backend file needs --transfer-directory: a directory that both sides share",
            topic="transports#a-shared-directory",
        )
    # Else a node that is told to be reached from here only, and asks for no secret, would be reached.
    if config.transfer.interface not in ("", "lo") and is_loopback(config.host):
        raise ConfigInvalid(
            f"--transfer-interface {config.transfer.interface} is for links to other hosts, and "
            f"--host {config.host} is for this one: give a --host that they reach",
            topic="transports#flags",
        )
    if config.role != "colocated":
        names_of(config.transfer.backend, engine.device)
    if engine.simulation is not None and engine.tp_size > 1:
        raise ConfigInvalid(
            f"--engine simulated is one process and --tp is {engine.tp_size}: leave --tp out, and have "
            "--sim-profile say how fast the devices are together"
        )
    if engine.simulation is not None and engine.device != "cpu":
        raise ConfigInvalid(
            f"--engine simulated uses no device and --device is {engine.device}: leave it out, and have "
            "--sim-profile say how fast it is"
        )
    if engine.tp_size > 1 and engine.device not in ("cpu", "cuda"):
        raise ConfigInvalid(
            f"--device {engine.device} is one device and --tp {engine.tp_size} takes more: give "
            "--device cuda, and rank r runs on cuda:r"
        )
    if not 0 < engine.mem_fraction_static <= 1:
        raise ConfigInvalid(
            f"--mem-fraction-static is {engine.mem_fraction_static}: give over 0, up to 1"
        )
    _check_tiers(config)
    return config


def _check_tiers(config: NodeConfig) -> None:
    engine = config.engine
    if not config.tiers.specs:
        return
    parse_tiers(config.tiers.specs)
    if not engine.is_prefix_cache_enabled:
        raise ConfigInvalid(
            "--kv-tier stands behind the prefix cache: leave --disable-prefix-cache out",
            topic="tiers",
        )
    if engine.simulation is not None and engine.simulation.kv == "none":
        raise ConfigInvalid(
            "--kv-tier keeps the bytes of pages, and those of --sim-kv none have none: give --sim-kv real",
            topic="simulation",
        )
