"""Runs a node command: from the command line to the exit status."""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop

from tandem.frontend.options import warn_of_exposed_keys
from tandem.node.checkpoint import resolve_model, sampling_defaults
from tandem.node.config import NodeConfig, NodeRole
from tandem.node.flags import MEANINGLESS, build_parser, read_config
from tandem.node.machine import warn_of_unused_gpus, with_dtype
from tandem.telemetry import log as logs
from tandem.wire.channel import PER_LINK, allow_descriptors
from tandem.wire.command_line import Parser
from tandem.wire.errors import TandemError
from tandem.wire.keys import cluster_key, operator_key, warn_of_weak_secret

log = logs.get_logger(__name__)

# The engine of every role with `--engine vllm`. It is not imported here: a node without vLLM has no use for it.
VLLM_MODULE = "tandem.vllm.engine"


@dataclass(frozen=True, slots=True)
class NodeCommand:
    """The differences between `prefill`, `decode` and `serve`. A node can switch to any role in `engine_modules`."""

    role: NodeRole
    engine_modules: Mapping[NodeRole, str]
    default_port: int
    summary: str
    prog: str = ""

    def build_parser(self) -> Parser:
        """Return the command's parser."""
        prog = self.prog or f"tandem {self.role}"
        return build_parser(prog, self.role, self.summary, self.default_port)


def run(command: NodeCommand, argv: Sequence[str]) -> int:
    """Run a node until a signal or a failure ends it.

    Returns:
        0 after a requested stop, 1 after a failure or a forced stop, 2 for an invalid configuration.
    """
    # Until the server installs its handlers, SIGTERM raises SystemExit, so that a conversion in progress is cleaned up.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
    parser = command.build_parser()
    try:
        config, meaningless = read_config(parser, command.role, argv)
        logs.configure(config.log_level, config.log_format, role=config.role)
        num_running = config.engine.max_running_requests
        allow_descriptors(PER_LINK + num_running, used_for=f"{num_running} requests")
        warn_of_exposed_keys(config.http)
        warn_of_weak_secret(os.environ.get("TANDEM_CLUSTER_KEY", ""))
        for flag in meaningless:
            log.warning(
                "flag.meaningless",
                flag=flag,
                reason=MEANINGLESS[flag],
                see="tandem docs migrating-from-sglang",
            )
        warn_of_unused_gpus(config.engine)
        key = cluster_key(config.host, is_insecure=config.is_insecure)
        config = _with_model(config)
        if config.generation_config == "auto":
            config = _with_sampling_defaults(config)
        operator = operator_key(os.environ.get("TANDEM_CLUSTER_KEY", ""))
        from tandem.node.supervisor import serve  # late: flag errors need not wait for its imports

        modules = command.engine_modules
        if config.simulation.engine == "vllm":
            modules = dict.fromkeys(modules, VLLM_MODULE)
        status: int = uvloop.run(serve(config, modules, key, operator))
    except TandemError as error:
        sys.stderr.write(f"{parser.prog}: error: {error.for_operators}\n")
        return 2
    except KeyboardInterrupt:
        return 0
    return status


def default_cache_dir() -> Path:
    """Return the default directory of converted models and tokenizers."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "tandem"


def _with_model(config: NodeConfig) -> NodeConfig:
    cache_dir = Path(config.cache_dir) if config.cache_dir else default_cache_dir()
    directory = resolve_model(config.model, cache_dir / "models", config.engine)
    engine = msgspec.structs.replace(config.engine, model_dir=str(directory))
    return msgspec.structs.replace(config, engine=with_dtype(engine, cache_dir))


def _with_sampling_defaults(config: NodeConfig) -> NodeConfig:
    found = sampling_defaults(Path(config.engine.model_dir))
    if found != config.default_sampling:
        log.info(
            "sampling_defaults.of_model",
            **msgspec.structs.asdict(found),
            see="tandem docs features#sampling-defaults",
        )
    return msgspec.structs.replace(config, default_sampling=found)
