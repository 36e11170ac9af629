"""Settings of a node that vLLM does not take as flags: environment variables, and the config of our connector."""

import os

import msgspec

from tandem.node.config import NodeConfig

# Turn off vLLM's usage reports and its verbose log. Values set by the operator take precedence.
ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Run a single rank in the node's engine process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}


def prepare_environment(config: NodeConfig) -> None:
    """Set the variables that the operator has not set. Call before vLLM is imported."""
    settings = dict(ENVIRONMENT)
    if config.host not in ("0.0.0.0", "::"):
        settings["VLLM_HOST_IP"] = (
            config.host
        )  # else vLLM takes the address on the route to the internet
    if config.engine.device == "cpu":
        settings["VLLM_CPU_KVCACHE_SPACE"] = str(max(1, config.engine.kv_bytes >> 30))
        if config.engine.num_threads:
            settings |= {
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "OMP_NUM_THREADS": str(config.engine.num_threads),
            }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def extra_config(config: NodeConfig) -> dict[str, object]:
    """Return the node's `kv_connector_extra_config`."""
    transfer = config.transfer
    # Decode pushes no layers, so vLLM may replay whole forwards as CUDA graphs.
    if config.role == "decode":
        transfer = msgspec.structs.replace(transfer, push_granularity="chunk")
    return {
        **msgspec.to_builtins(transfer),
        "host": config.host,
        "is_insecure": config.is_insecure,
        "heartbeat_interval_ms": config.heartbeat_interval_ms,
    }
