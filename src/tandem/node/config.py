"""The configuration of a node: read by `flags.py`, validated by `check`, immutable."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from tandem.engine.config import EngineConfig, EngineOptions
from tandem.engine.profile import Profile, Simulation, read_profile
from tandem.frontend.options import (
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
    REASONING_PARSER,
    TOOL_CALL_PARSER,
    HttpOptions,
    served_names,
)
from tandem.kvtier.spec import parse_tiers
from tandem.kvtransfer.config import TransferConfig
from tandem.kvtransfer.transports.registry import WITH_DEVICES, names_of
from tandem.settings.flags import HEARTBEAT, LOG_FORMAT, LOG_LEVEL, PORT, Flag
from tandem.telemetry.log import LogFormat
from tandem.wire.channel import Heartbeat, heartbeat_of
from tandem.wire.errors import ConfigInvalid
from tandem.wire.events.publisher import KvEventsConfig
from tandem.wire.generation import SamplingDefaults
from tandem.wire.hosts import HOST, checked_url
from tandem.wire.keys import is_loopback

NodeRole = Literal["prefill", "decode", "colocated"]

# Equal to Kubernetes' default grace period. A pod that drains needs a few seconds more.
DRAIN_TIMEOUT_S = 30.0
# Longer than any forward, even one that compiles for a new batch size.
STEP_TIMEOUT_S = 300.0
MAX_STEP_S = 86_400.0
# One day. No answer takes longer, so a larger value is a mistake.
MAX_DRAIN_S = 86_400.0


def _host_tier(unit: str, size: str) -> str:
    return f"host:{float(size):g}{unit}" if float(size) else ""


class TierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the tiers below the prefix cache.

    Attributes:
        specs: See `tandem.kvtier.spec`.
        timeout_s: 0.5 s is half of SGLang's timeout, and more than a healthy store needs for several
            thousand tokens.
        min_tokens: 256 is SGLang's default.
        staging_bytes: 2 GiB hold 8k tokens of an 8B model in each direction.
    """

    specs: Annotated[
        tuple[str, ...],
        Flag(
            "--kv-tier",
            group="tiers",
            metavar="SPEC",
            help="store KV outside the device: host:8GiB, disk:/dir:200GiB or redis://host:6379/0; repeat, "
            "fastest first; see docs/tiers.md",
            # SGLang's and vLLM's flags for host memory.
            aliases={
                "--hicache-size": partial(_host_tier, "GB"),
                "--kv-offloading-size": partial(_host_tier, "GiB"),
            },
            # A host tier is the fastest, so it goes first regardless of the order of flags. Empty specs are dropped.
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
            help="maximum time that a request waits for tiers; the rest of its prompt is computed",
        ),
    ] = 0.5
    min_tokens: Annotated[
        int,
        Flag(
            "--kv-tier-min-tokens",
            metavar="TOKENS",
            ge=0,
            help="prompts with fewer uncached tokens are computed without a search of the tiers",
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
    """Command-line options of a simulated engine; the source of `EngineOptions.simulation`."""

    engine: Annotated[
        Literal["model", "simulated", "vllm"],
        Flag(
            "--engine",
            group="simulation",
            help="vllm: run vLLM; flags after -- are passed to it; see docs/vllm.md. simulated: forwards "
            "only take time; see docs/simulation.md",
        ),
    ] = "model"
    profile: Annotated[
        str,
        Flag(
            "--sim-profile",
            metavar="FILE",
            help="JSON file with the duration of forwards in milliseconds; without it forwards take no time",
        ),
    ] = ""
    kv: Annotated[
        Literal["", "real", "none"],
        Flag(
            "--sim-kv",
            help="real (default): pages have the model's size, and nodes push them; none: pages have two "
            "bytes per token, so that a pool of any size fits (default: one million tokens)",
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
                    f"{flag} {value} needs --engine simulated; set it too, or remove {flag}",
                    topic="docs/simulation.md",
                )
        return None


# As long as the silence after which the node itself reports that its engine is hung.
PAUSE_S = 30.0


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a node, an HTTP process and the engine process under it, as the operator set them.

    Attributes:
        model: Reference of the model: a path, a name on the hub, or None for the embedded model.
        chat_template: The template itself; empty: the model's own.
        engine_port: Port of the engine's links to edge workers, which read it from `/server_info`.
        served_model_names: At least one name, once the command line was read.
        default_sampling: Defaults of sampling parameters that a request omits.
        weight_version: As in `ModelInfo`.
        vllm_args: Arguments after `--`, passed to vLLM.
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
    served_model_names: Annotated[
        tuple[str, ...],
        Flag(
            "--served-model-name",
            metavar="NAME",
            nargs="+",
            help="the model's name in answers, and more names that clients may use",
            parse=served_names,
        ),
    ] = ()
    cache_dir: Annotated[
        str,
        Flag(
            "--cache-dir",
            metavar="DIR",
            help="directory of converted models and tokenizers (default: $XDG_CACHE_HOME/tandem)",
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
            help="time for running requests to finish after SIGTERM or POST /drain, before they "
            "move to other nodes; 0 moves them immediately",
        ),
    ] = DRAIN_TIMEOUT_S
    step_timeout_s: Annotated[
        float,
        Flag(
            "--step-timeout-s",
            metavar="SECONDS",
            ge=1,
            le=MAX_STEP_S,
            help="time limit of one engine step; a longer step ends the node. The first steps, which may "
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
            help="/generate streams the new text of each event instead of all text so far",
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
    engine: EngineOptions = EngineOptions()
    tiers: TierConfig = TierConfig()
    kv_events: KvEventsConfig = KvEventsConfig()
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
            help="URL at which routers reach this node (default: --host and --port; if --host is all addresses, "
            "this machine's source address for connections to the router)",
            parse=partial(checked_url, "--advertise-url"),
        ),
    ] = ""
    transfer: TransferConfig = TransferConfig()
    simulation: SimulationConfig = SimulationConfig()
    vllm_args: tuple[str, ...] = ()

    @property
    def served_model_name(self) -> str:
        """Name of the model in answers."""
        return self.served_model_names[0]

    @property
    def heartbeat(self) -> Heartbeat:
        """The heartbeat of this node's links. That of a colocated node leads to its own engine, which may pause."""
        heartbeat = heartbeat_of(self.heartbeat_interval_ms)
        return replace(heartbeat, pause_s=PAUSE_S) if self.role == "colocated" else heartbeat


class NodeConfig(NodeOptions, frozen=True, kw_only=True):
    """A node whose model is on this machine, in `engine.model_dir`."""

    engine: EngineConfig


def check(config: NodeOptions) -> NodeOptions:
    """Return `config`, or raise `ConfigInvalid` with the flag that is wrong and what to do."""
    heartbeat_of(config.heartbeat_interval_ms)
    engine = config.engine
    # Otherwise a node on loopback, which requires no secret, would be reachable from other hosts.
    if config.transfer.interface not in ("", "lo") and is_loopback(config.host):
        raise ConfigInvalid(
            f"--transfer-interface {config.transfer.interface} is for links to other hosts, but "
            f"--host {config.host} is loopback; set --host to an address that they reach",
            topic="docs/transports.md#flags",
        )
    if config.role != "colocated":
        _check_transfer(config)
    if engine.simulation is not None and engine.tp_size > 1:
        raise ConfigInvalid(
            "--engine simulated does not take --tp; put the combined speed into --sim-profile"
        )
    if engine.simulation is not None and engine.device != "cpu":
        raise ConfigInvalid(
            "--engine simulated does not take --device; put the device's speed into --sim-profile"
        )
    if engine.tp_size > 1 and engine.device not in ("cpu", "cuda"):
        raise ConfigInvalid(
            f"--device {engine.device} is one device, but --tp {engine.tp_size} needs {engine.tp_size}; set "
            "--device cuda, and rank r runs on cuda:r"
        )
    if not 0 < engine.mem_fraction_static <= 1:
        raise ConfigInvalid(
            f"--mem-fraction-static is {engine.mem_fraction_static}; set more than 0 and at most 1"
        )
    if config.vllm_args and config.simulation.engine != "vllm":
        raise ConfigInvalid(
            "flags after -- are passed to vLLM; set --engine vllm, or remove them",
            topic="docs/vllm.md",
        )
    _check_tiers(config)
    _check_kv_events(config)
    return config


def transports_of(config: NodeOptions) -> list[str]:
    """Return the transports that a node may use, best first; raise `ConfigInvalid` if one does not reach its pool."""
    is_own_pool = config.simulation.engine != "vllm"
    return names_of(config.transfer.backend, config.engine.device, is_own_pool=is_own_pool)


def _check_transfer(config: NodeOptions) -> None:
    names, interface = transports_of(config), config.transfer.interface
    if interface and WITH_DEVICES.issuperset(names):
        raise ConfigInvalid(
            f"--transfer-interface {interface} is of tcp; set --transfer-device for {', '.join(names)}",
            topic="docs/transports.md#flags",
        )
    config.transfer.of_transports(config.host, 0, config.engine.tp_size)


def _check_tiers(config: NodeOptions) -> None:
    engine = config.engine
    if not config.tiers.specs:
        return
    parse_tiers(config.tiers.specs)
    if not engine.is_prefix_cache_enabled:
        raise ConfigInvalid(
            "--kv-tier needs the prefix cache; remove --disable-prefix-cache",
            topic="docs/tiers.md",
        )
    if engine.simulation is not None and engine.simulation.kv == "none":
        raise ConfigInvalid(
            "--kv-tier needs page bytes, which --sim-kv none does not have; use --sim-kv real",
            topic="docs/simulation.md",
        )


def _check_kv_events(config: NodeOptions) -> None:
    events = config.kv_events
    if (events.replay_endpoint or events.topic) and not events.endpoint:
        raise ConfigInvalid(
            "--kv-events-replay-endpoint and --kv-events-topic need --kv-events-endpoint; set it too",
            topic="docs/kv-events.md",
        )
    if events.endpoint and not config.engine.is_prefix_cache_enabled:
        raise ConfigInvalid(
            "--kv-events-endpoint needs the prefix cache; remove --disable-prefix-cache",
            topic="docs/kv-events.md",
        )
