"""The settings of a node as those of vLLM. Settings that the node cannot serve are refused here."""

import argparse
import shlex
from collections.abc import Sequence

from vllm.config import KVEventsConfig, KVTransferConfig, ParallelConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tandem.node.config import NodeConfig
from tandem.vllm.connector import check_blocks_are_whole
from tandem.vllm.node.adapters import add_argument
from tandem.vllm.node.data_parallel import check_interface
from tandem.vllm.node.environment import extra_config
from tandem.wire.errors import ConfigInvalid
from tandem.wire.hosts import is_address
from tandem.wire.keys import is_loopback

# Default of --max-cpu-loras: adapters that a node keeps in memory.
MAX_ADAPTERS = 1024

SEVERAL_HOSTS = "docs/vllm.md#several-hosts"


def parse_arguments(config: NodeConfig) -> argparse.Namespace:
    """Parse the node's settings and the arguments after `--`, which override them, as arguments of `vllm serve`.

    Raises:
        ConfigInvalid: vLLM does not accept the arguments.
    """
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog="--engine vllm", add_help=False))
    add_argument(parser)
    try:
        args: argparse.Namespace = parser.parse_args([*_own_flags(config), *config.vllm_args])
    except (SystemExit, ValueError) as error:
        raise ConfigInvalid(
            f"vLLM does not accept the arguments {shlex.join(config.vllm_args)}",
            topic="docs/vllm.md",
        ) from error
    if args.lora_modules and not args.enable_lora:
        raise ConfigInvalid("--lora-modules needs --enable-lora", topic="docs/vllm.md")
    if args.enable_lora and args.max_cpu_loras is None:
        # vLLM's default is --max-loras, with which no adapter could be loaded while as many are in use.
        args.max_cpu_loras = max(args.max_loras, MAX_ADAPTERS)
    return args


def vllm_config_of(config: NodeConfig, args: argparse.Namespace) -> VllmConfig:
    """Return vLLM's settings of a node.

    Raises:
        ConfigInvalid: vLLM or the node rejects the settings; the message says what to do.
    """
    if args.distributed_executor_backend == "ray":
        raise ConfigInvalid(
            "--distributed-executor-backend ray: use --nnodes, --node-rank and --master-addr instead",
            topic=SEVERAL_HOSTS,
        )
    try:
        engine_args = EngineArgs.from_cli_args(args)
        if config.role != "colocated":
            engine_args.kv_transfer_config = _transfer(config)
        engine_args.kv_events_config = _kv_events(config, engine_args.kv_events_config)
        vllm_config = engine_args.create_engine_config()
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        words = " ".join(str(error).split())
        raise ConfigInvalid(
            f"vLLM rejects these settings: {words}", topic="docs/vllm.md"
        ) from error
    parallel = vllm_config.parallel_config
    if parallel.data_parallel_size > 1 and not parallel.data_parallel_external_lb:
        raise ConfigInvalid(
            "--data-parallel-size: a node is one rank; start a node for each with --data-parallel-rank, or, without experts, "
            "remove the flag",
            topic="docs/vllm.md",
        )
    _check_hosts(config, parallel)
    if config.tiers.specs and (config.role == "colocated" or parallel.world_size > 1):
        raise ConfigInvalid(
            "--kv-tier with --engine vllm needs a prefill or decode node with one rank; remove it, or the other flags",
            topic="docs/tiers.md#with-vllm",
        )
    if vllm_config.kv_transfer_config is not None:
        check_blocks_are_whole(vllm_config)
    return vllm_config


def _check_hosts(config: NodeConfig, parallel: ParallelConfig) -> None:
    if config.role == "prefill" and parallel.world_size > 1 and not config.transfer.bootstrap_port:
        raise ConfigInvalid(
            "--bootstrap-port is 0 (any free port), but with --engine vllm rank r uses the port plus r; set a port",
            topic="docs/vllm.md",
        )
    if parallel.nnodes == 1:
        if parallel.node_rank:
            raise ConfigInvalid(
                "--node-rank needs --nnodes, the number of hosts; set it on all of them",
                topic=SEVERAL_HOSTS,
            )
        return
    if config.role == "colocated" or parallel.data_parallel_size > 1:
        raise ConfigInvalid(
            "--nnodes needs a prefill or decode node without data parallelism; remove it, or --data-parallel-size",
            topic=SEVERAL_HOSTS,
        )
    check_interface("--master-addr", parallel.master_addr)
    if not is_address(config.host) or is_loopback(config.host) != is_loopback(parallel.master_addr):
        raise ConfigInvalid(
            f"--host {config.host}, --master-addr {parallel.master_addr}: the hosts of a node connect to each other; set "
            "--host to the IP address of this host, and --master-addr to that of the first",
            topic=SEVERAL_HOSTS,
        )
    if parallel.node_rank and config.routers:
        raise ConfigInvalid(
            "--router: only the first host of a node announces it; remove it from the others",
            topic=SEVERAL_HOSTS,
        )


def _own_flags(config: NodeConfig) -> Sequence[str]:
    """Convert our own settings to flags of vLLM."""
    engine = config.engine
    flags = {
        "--model": engine.model_dir,
        "--dtype": engine.dtype,
        "--tensor-parallel-size": engine.tp_size,
        "--max-num-seqs": engine.max_running_requests,
        "--max-model-len": engine.context_length,
    }
    words = [word for flag, value in flags.items() if value for word in (flag, str(value))]
    return words + ([] if engine.is_prefix_cache_enabled else ["--no-enable-prefix-caching"])


def _kv_events(config: NodeConfig, given: KVEventsConfig | None) -> KVEventsConfig:
    """Return the settings of vLLM's publisher. Its events are needed in any case, for the journal."""
    own = config.kv_events
    if own.endpoint and given is not None:
        raise ConfigInvalid(
            "--kv-events-endpoint and vLLM's --kv-events-config are both set; remove one of them",
            topic="docs/kv-events.md",
        )
    if given is not None:
        return given
    if not own.endpoint:
        return KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    return KVEventsConfig(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=own.endpoint,
        replay_endpoint=own.replay_endpoint or None,
        topic=own.topic,
    )


def _transfer(config: NodeConfig) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="TandemConnector",
        kv_role="kv_producer" if config.role == "prefill" else "kv_consumer",
        kv_load_failure_policy="fail",
        kv_connector_extra_config=extra_config(config),
    )
