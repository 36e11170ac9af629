"""Runs a node command, from the command line to the exit status."""

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import uvloop

from tandem.engine.config import config_with_model
from tandem.frontend.options import warn_of_exposed_keys
from tandem.node.config import NodeConfig, NodeOptions, NodeRole
from tandem.node.flags import FLAGS_WITHOUT_EFFECT, build_parser, read_options
from tandem.node.machine import require_packages, warn_of_unused_gpus, with_dtype
from tandem.node.models.checkpoint import resolve_model, sampling_defaults
from tandem.settings.flags import error_prefix
from tandem.settings.parser import Parser
from tandem.telemetry import log as logs
from tandem.wire.channel import DESCRIPTORS_PER_LINK, raise_descriptor_limit
from tandem.wire.errors import ConfigInvalid, TandemError
from tandem.wire.keys import cluster_key, operator_key, warn_of_weak_secret

log = logs.get_logger(__name__)

# The engine module of every role with `--engine vllm`. Named, not imported: vLLM may not be installed.
VLLM_MODULE = "tandem.vllm.node.engine"


@dataclass(frozen=True, slots=True)
class NodeCommand:
    """The differences between `prefill`, `decode` and `serve`. A node can change to any role in `engine_modules`."""

    role: NodeRole
    engine_modules: Mapping[NodeRole, str]
    default_port: int
    summary: str
    prog: str = ""

    def build_parser(self) -> Parser:
        """Return the command's parser."""
        prog = self.prog or f"tandem {self.role}"
        return build_parser(prog, self.role, self.summary, self.default_port)


# A running node can change between these roles. Modules are given by name, because node/ must not import roles.
_ENGINES: dict[NodeRole, str] = {"prefill": "tandem.prefill.role", "decode": "tandem.decode.role"}
COMMANDS = {
    "prefill": NodeCommand(
        role="prefill",
        engine_modules=_ENGINES,
        default_port=7000,
        summary="Compute the KV of prompts and push it into the memory of decode nodes.",
    ),
    "decode": NodeCommand(
        role="decode",
        engine_modules=_ENGINES,
        default_port=7001,
        summary="Receive the KV of prompts from prefill nodes, and generate.",
    ),
}


def run(command: NodeCommand, argv: Sequence[str]) -> int:
    """Run a node until a signal or a failure ends it.

    Returns:
        0 after a requested stop, 1 after a failure or a forced stop, 2 for an invalid configuration.
    """
    # Until the server installs its handlers, SIGTERM raises SystemExit, which cleans up a conversion in progress.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(0))
    parser = command.build_parser()
    try:
        options, ignored = read_options(parser, command.role, argv)
        if options.simulation.engine != "vllm":  # vLLM's environment has the packages that it needs
            require_packages()
        logs.configure(options.log_level, options.log_format, role=options.role)
        num_running = options.engine.max_running_requests
        raise_descriptor_limit(
            DESCRIPTORS_PER_LINK + num_running, used_for=f"{num_running} requests"
        )
        warn_of_exposed_keys(options.http)
        warn_of_weak_secret(os.environ.get("TANDEM_CLUSTER_KEY", ""))
        for flag in ignored:
            log.warning(
                "flag.ignored",
                flag=flag,
                reason=FLAGS_WITHOUT_EFFECT[flag],
                see="docs/migrating-from-sglang.md",
            )
        warn_of_unused_gpus(options.engine)
        key = cluster_key(options.host, is_insecure=options.is_insecure)
        config = with_model(options)
        if config.generation_config == "auto":
            config = _with_sampling_defaults(config)
        operator = operator_key(os.environ.get("TANDEM_CLUSTER_KEY", ""))
        from tandem.node.process.supervisor import (
            serve,  # late, so that flag errors do not wait for its imports
        )

        modules = command.engine_modules
        if config.simulation.engine == "vllm":
            modules = dict.fromkeys(modules, VLLM_MODULE)
        status: int = uvloop.run(serve(config, modules, key, operator))
    except TandemError as error:
        sys.stderr.write(f"{error_prefix(parser.prog)}{error.for_operators}\n")
        return 2
    except KeyboardInterrupt:
        return 0
    return status


prefill = partial(run, COMMANDS["prefill"])
decode = partial(run, COMMANDS["decode"])


def default_cache_dir() -> Path:
    """Return the default directory of converted models and tokenizers.

    Raises:
        ConfigInvalid: This user has no home directory.
    """
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "tandem"
    try:
        return Path.home() / ".cache" / "tandem"
    except RuntimeError as error:  # HOME is not set, and the user id has no entry in /etc/passwd
        raise ConfigInvalid(
            "this user has no home directory for the cache of converted models; set HOME or --cache-dir"
        ) from error


def with_model(options: NodeOptions) -> NodeConfig:
    """Return the config of a node whose model is on this machine. Download or convert the model if necessary.

    Raises:
        ConfigInvalid: The model does not exist or is incomplete; the message says what to do.
    """
    cache_dir = Path(options.cache_dir) if options.cache_dir else default_cache_dir()
    directory = resolve_model(options.model, cache_dir / "models", options.engine)
    engine = with_dtype(config_with_model(options.engine, directory))
    changed = {"engine": engine, "cache_dir": str(cache_dir)}
    return NodeConfig(**msgspec.structs.asdict(options) | changed)


def _with_sampling_defaults(config: NodeConfig) -> NodeConfig:
    found = sampling_defaults(Path(config.engine.model_dir))
    if found != config.default_sampling:
        log.info(
            "sampling_defaults.read",
            **msgspec.structs.asdict(found),
            see="docs/features.md#sampling-defaults",
        )
    return msgspec.structs.replace(config, default_sampling=found)
