"""What two processes share: ids, messages, a framed channel and error types.

msgspec decodes a peer's bytes into a known struct or rejects them; nothing is unpickled.
"""
