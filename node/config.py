"""A node's configuration: read by `flags.py`, validated by `check`, immutable."""

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tandem.engine.config import EngineConfig
from tandem.engine.profile import Profile, Simulation, read_profile
from tandem.frontend.options import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    REASONING_PARSER,
    TOOL_CALL_PARSER,
    HttpOptions,
)
from tandem.kvtier.spec import parse_tiers
from tandem.kvtransfer.checksum import Verify
from tandem.kvtransfer.transports.registry import names_of
from tandem.telemetry.log import LogFormat
from tandem.wire.channel import Heartbeat, heartbeat_of
from tandem.wire.errors import ConfigInvalid
from tandem.wire.generation import SamplingDefaults
from tandem.wire.hosts import checked_url
from tandem.wire.keys import is_loopback
from tandem.wire.options import HEARTBEAT, HOST, LOG_FORMAT, LOG_LEVEL, PORT, Flag

NodeRole = Literal["prefill", "decode", "colocated"]

# Kubernetes' default grace period. A pod that drains needs a grace period some seconds longer.
DRAIN_TIMEOUT_S = 30.0
# Longer than any forward, including one that compiles for a new batch size.
STEP_TIMEOUT_S = 300.0
MAX_STEP_S = 86_400.0
# A day. No answer takes longer, so a larger value is a mistake.
MAX_DRAIN_S = 86_400.0


def _host_tier(unit: str, size: str) -> str:
    return f"host:{float(size):g}{unit}" if float(size) else ""


class TransferConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the KV transfer.

    Attributes:
        bootstrap_port: 8998 is SGLang's default.
        grant_timeout_s: Includes the time in decode's queue for pages. A half whose edge worker is lost ends at
            once; this timeout is for halves that no edge worker tracks. 300 s is SGLang's default.
        early_grant_timeout_s: How long a grant waits for its request. Its pages are idle meanwhile.
        landed_timeout_s: How long decode waits for the pages of a grant to land, including prefill's queue.
        verify: `sample` hashes one slab in 64, and still detects a corrupting link within a few prompts.
    """

    backend: Annotated[
        str,
        Flag(
            "--transfer-backend",
            "--disaggregation-transfer-backend",
            group="transfer",
            metavar="NAME",
            help="how KV moves: auto, shm, tcp, cuda_ipc, nixl, ucx, mooncake, nccl, file; see "
            "`tandem docs transports`",
        ),
    ] = "auto"
    directory: Annotated[
        str,
        Flag(
            "--transfer-directory",
            metavar="DIR",
            help="directory of --transfer-backend file, writable from both sides",
        ),
    ] = ""
    interface: Annotated[
        str,
        Flag(
            "--transfer-interface",
            metavar="NAME",
            help="network interface of tcp, by its IPv4 or IPv6 address as in --host",
        ),
    ] = ""
    bootstrap_port: Annotated[
        int,
        Flag(
            "--bootstrap-port",
            "--disaggregation-bootstrap-port",
            metavar="PORT",
            ge=0,
            le=65535,
            help="on prefill: port for grants; on decode: the port used when a request names none",
        ),
    ] = 8998
    grant_timeout_s: Annotated[
        float,
        Flag(
            "--grant-timeout",
            metavar="SECONDS",
            help="time that prefill waits for decode to grant pages",
        ),
    ] = 300.0
    early_grant_timeout_s: float = 30.0
    landed_timeout_s: float = 600.0
    push_granularity: Annotated[
        Literal["layer", "chunk"],
        Flag(
            "--push-granularity",
            help="on prefill: push KV as layers are computed, or after each chunk of a prompt",
        ),
    ] = "layer"
    verify: Annotated[
        Verify,
        Flag(
            "--verify-kv",
            help="how much of each page both sides hash; sample: K or V of one layer in 32",
            aliases={"--no-kv-checksum": "off"},
        ),
    ] = "sample"


class TierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the tiers behind the prefix cache.

    Attributes:
        specs: See `tandem.kvtier.spec`.
        timeout_s: 0.5 s is half of SGLang's timeout, and more than a healthy store needs for several
            thousand tokens.
        min_tokens: 256 is SGLang's default.
        staging_bytes: In 2 GiB each direction fits 8k tokens of an 8B model.
    """

    specs: Annotated[
        tuple[str, ...],
        Flag(
            "--kv-tier",
            group="tiers",
            metavar="SPEC",
            help="keep KV beyond the device: host:8GiB, disk:/dir:200GiB or redis://host:6379/0; repeated, "
            "fastest first; see `tandem docs tiers`",
            # SGLang's and vLLM's flags for host memory.
            aliases={
                "--hicache-size": partial(_host_tier, "GB"),
                "--kv-offloading-size": partial(_host_tier, "GiB"),
            },
            # A host tier is the fastest, so it goes first wherever its flag stands. Empty specs are dropped.
            parse=lambda specs: tuple(
                sorted(filter(None, specs), key=lambda spec: not spec.startswith("host:"))
            ),
        ),
    ] = ()
    timeout_s: Annotated[
        float,
        Flag(
            "--kv-tier-timeout-ms",
            metavar="MS",
            ge=1,
            scale=0.001,
            help="time that a request waits for tiers at most; the rest of its prompt is computed",
        ),
    ] = 0.5
    min_tokens: Annotated[
        int,
        Flag(
            "--kv-tier-min-tokens",
            metavar="TOKENS",
            ge=0,
            help="prompts with fewer uncached tokens are computed without asking the tiers",
        ),
    ] = 256
    staging_bytes: Annotated[
        int,
        Flag(
            "--kv-tier-staging-mib",
            metavar="MIB",
            ge=1,
            scale=1 << 20,
            help="host memory for pages on their way to and from tiers",
        ),
    ] = 2 << 30


class SimulationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Command-line options of a simulated engine; the source of `EngineConfig.simulation`."""

    engine: Annotated[
        Literal["model", "simulated", "vllm"],
        Flag(
            "--engine",
            group="simulation",
            help="vllm: vLLM computes, and flags behind -- are its own; see `tandem docs vllm`. simulated: forwards "
            "only take time; see `tandem docs simulation`",
        ),
    ] = "model"
    profile: Annotated[
        str,
        Flag(
            "--sim-profile",
            metavar="FILE",
            help="JSON file of the milliseconds that forwards take; without it, no time at all",
        ),
    ] = ""
    kv: Annotated[
        Literal["", "real", "none"],
        Flag(
            "--sim-kv",
            help="real (default): pages have the model's bytes, and nodes push them; none: two bytes a "
            "token, so that a pool of any size fits: a million tokens, or --max-total-tokens",
        ),
    ] = ""

    def simulation(self) -> Simulation | None:
        """Return the requested simulation, or None; raise `ConfigInvalid` for invalid options or profiles."""
        if self.engine == "simulated":
            profile = read_profile(Path(self.profile)) if self.profile else Profile()
            return Simulation(profile=profile, kv=self.kv or "real")
        for flag, value in (("--sim-profile", self.profile), ("--sim-kv", self.kv)):
            if value:
                raise ConfigInvalid(
                    f"{flag} {value} is for --engine simulated: give that, too", topic="simulation"
                )
        return None


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One node: an HTTP process and the engine process under it.

    Attributes:
        chat_template: The template itself; empty: the model's own.
        engine_port: Port of the engine's links to edge workers, which read it from `/server_info`.
        default_sampling: Defaults of sampling parameters that a request omits.
        weight_version: As in `ModelInfo`.
        vllm_args: With `--engine vllm`, what stands behind `--`.
    """

    role: NodeRole
    model: Annotated[
        str | None,
        Flag(
            "--model",
            "--model-path",
            group="model",
            metavar="MODEL",
            help="a transformers directory, a GGUF file, or a name on the Hugging Face Hub: "
            "org/name[:GGUF][@REVISION]; without it, the embedded SmolLM2-135M-Instruct",
        ),
    ] = None
    served_model_name: Annotated[
        str, Flag("--served-model-name", metavar="NAME", help="the model's name for clients")
    ] = ""
    cache_dir: Annotated[
        str,
        Flag(
            "--cache-dir",
            metavar="DIR",
            help="directory of converted models (default: $XDG_CACHE_HOME/tandem)",
        ),
    ] = ""
    host: Annotated[str, HOST] = "127.0.0.1"
    port: Annotated[int, PORT] = 7000
    zone: Annotated[
        str,
        Flag(
            "--zone",
            metavar="NAME",
            help="the node's zone; routers prefer pairs of nodes in one zone",
        ),
    ] = ""
    engine_port: Annotated[
        int,
        Flag(
            "--engine-port",
            metavar="PORT",
            le=65535,
            help="port of the engine's links to routers; 0: any free port",
        ),
    ] = 0
    heartbeat_interval_ms: Annotated[float, HEARTBEAT] = 500.0
    drain_timeout_s: Annotated[
        float,
        Flag(
            "--drain-timeout-s",
            metavar="SECONDS",
            ge=0,
            le=MAX_DRAIN_S,
            help="time that running requests have to finish after SIGTERM or POST /drain, before they "
            "move to other nodes; 0 moves them at once",
        ),
    ] = DRAIN_TIMEOUT_S
    step_timeout_s: Annotated[
        float,
        Flag(
            "--step-timeout-s",
            metavar="SECONDS",
            ge=1,
            le=MAX_STEP_S,
            help="limit of one step of the engine; a longer one ends the node. The first steps, which may "
            "compile, have no limit",
        ),
    ] = STEP_TIMEOUT_S
    http: HttpOptions = HttpOptions()
    log_level: Annotated[str, LOG_LEVEL] = "info"
    log_format: Annotated[LogFormat, LOG_FORMAT] = "auto"
    is_incremental_output: Annotated[
        bool,
        Flag(
            "--incremental-streaming-output",
            help="/generate streams new text instead of all text so far",
        ),
    ] = False
    chat_template: Annotated[str, CHAT_TEMPLATE] = ""
    tool_call_parser: Annotated[str, TOOL_CALL_PARSER] = ""
    reasoning_parser: Annotated[str, REASONING_PARSER] = ""
    generation_config: Annotated[Literal["auto", "none"], GENERATION_CONFIG] = "auto"
    default_sampling: SamplingDefaults = SamplingDefaults()
    weight_version: str = "default"
    is_insecure: Annotated[
        bool,
        Flag(
            "--insecure",
            help="listen beyond loopback without TANDEM_CLUSTER_KEY, trusting the network",
        ),
    ] = False
    engine: EngineConfig = EngineConfig()
    tiers: TierConfig = TierConfig()
    routers: Annotated[
        tuple[str, ...],
        Flag(
            "--router",
            group="routers",
            metavar="URL",
            help="announce the node to this router every 3 s; may be repeated",
            parse=lambda urls: tuple(checked_url("--router", url) for url in urls),
        ),
    ] = ()
    advertise_url: Annotated[
        str,
        Flag(
            "--advertise-url",
            metavar="URL",
            help="where routers reach this node (default: --host and --port; if --host is all addresses, "
            "the address from which this machine reaches the router)",
            parse=partial(checked_url, "--advertise-url"),
        ),
    ] = ""
    transfer: TransferConfig = TransferConfig()
    simulation: SimulationConfig = SimulationConfig()
    vllm_args: tuple[str, ...] = ()

    @property
    def heartbeat(self) -> Heartbeat:
        """The heartbeat of this node's links."""
        return heartbeat_of(self.heartbeat_interval_ms)


def check(config: NodeConfig) -> NodeConfig:
    """Return `config` if it is valid; else raise `ConfigInvalid`, which names the flag and a remedy."""
    heartbeat_of(config.heartbeat_interval_ms)
    engine = config.engine
    if "file" in config.transfer.backend.split(",") and not config.transfer.directory:
        raise ConfigInvalid(
            "--transfer-backend file needs --transfer-directory: a directory that both sides share",
            topic="transports#a-shared-directory",
        )
    # Otherwise a node on loopback, which requires no secret, would be reachable from other hosts.
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
    if config.simulation.engine == "vllm":
        _check_vllm(config)
    elif config.vllm_args:
        raise ConfigInvalid("flags behind -- are vLLM's: give --engine vllm, too", topic="vllm")
    _check_tiers(config)
    return config


def _check_vllm(config: NodeConfig) -> None:
    if config.tiers.specs:
        raise ConfigInvalid(
            "--kv-tier keeps pages of our own engine: with --engine vllm leave it out", topic="vllm"
        )
    if config.engine.tp_size > 1 and not config.transfer.bootstrap_port:
        raise ConfigInvalid(
            "--bootstrap-port 0 is any free port, and with --engine vllm rank r has the r-th port after it: give a port"
        )


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
