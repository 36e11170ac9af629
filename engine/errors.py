"""Errors of the engine's own. Apart from `step`, which `grammar` must not import: requests have grammars."""

from tandem.wire.errors import EngineFailed


class GrammarViolated(EngineFailed, code="grammar_violated", is_retryable=False):
    """A token came that the grammar does not allow: a bug, or another node's grammar differs."""

    def __init__(self, token_id: int, index: int) -> None:
        super().__init__(f"token {token_id} at index {index} is not allowed by the grammar")
        self.token_id, self.index = token_id, index


class DeviceLost(BaseException):
    """The device computes nothing any more for this process: only another process may use it.

    Not an `Exception`: code that catches those to fail one request and go on must not catch this.
    """
