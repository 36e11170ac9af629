"""The engine's own errors. Separate from `step`, because `grammar` importing `step` would be an import cycle."""

from tandem.wire.errors import EngineFailed


class GrammarViolated(EngineFailed, code="grammar_violated", is_retryable=False):
    """A token came that the grammar does not allow: a bug, or another node's grammar differs."""

    def __init__(self, token_id: int, index: int) -> None:
        super().__init__(f"token {token_id} at index {index} is not allowed by the grammar")
        self.token_id, self.index = token_id, index


class DeviceLost(BaseException):
    """The device is unusable for the rest of this process; only a new process can use it.

    Not an `Exception`, so that handlers which fail one request and continue do not catch it.
    """
