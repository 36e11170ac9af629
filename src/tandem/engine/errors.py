"""The engine's own errors, in a separate file so that `grammar` need not import `scheduling`."""

from tandem.wire.errors import EngineFailed


class GrammarViolated(EngineFailed, code="grammar_violated", is_retryable=False):
    """A token violates the grammar: a bug, or a different node uses a different grammar."""

    def __init__(self, token_id: int, index: int) -> None:
        super().__init__(f"token {token_id} at index {index} is not allowed by the grammar")
        self.token_id, self.index = token_id, index


class DeviceLost(BaseException):
    """The device is unusable for the rest of this process.

    Not an `Exception`, so that handlers that fail one request and continue do not catch it.
    """
