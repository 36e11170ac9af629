"""All that two processes share: ids, messages, one framed channel, error types.

Imports only telemetry. Bytes from a peer are decoded by msgspec into a known struct or refused;
there is no pickle anywhere.
"""
