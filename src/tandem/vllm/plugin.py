"""The plugin entry point that vLLM calls in each of its processes to find our connector by name."""


def register() -> None:
    """Register the connector by name. Its module is imported on first use."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name = "TandemConnector"
    KVConnectorFactory.register_connector(name, "tandem.vllm.connector", name)
