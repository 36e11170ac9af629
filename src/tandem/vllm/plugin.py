"""What vLLM calls in each of its processes, so that it knows our connector by its name."""


def register() -> None:
    """Register the connector. Nothing else is imported before it is used."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    name = "TandemConnector"
    KVConnectorFactory.register_connector(name, "tandem.vllm.connector", name)
