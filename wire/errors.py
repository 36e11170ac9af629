"""Errors named by phase and fault, with what HTTP and the router need to know of them.

A class may make its own sentence of what it is given. `ErrorInfo` is the form that crosses a process border;
`error_from_info` gives back an exception of the same class.
"""

from collections.abc import Callable

import msgspec
from typing_extensions import override


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An error as it travels between processes; see `TandemError`."""

    code: str
    message: str
    status: int = 500
    is_retryable: bool = False
    retry_after_s: int = 0
    topic: str = ""


class TandemError(Exception):
    """Base of every error we raise on purpose.

    Attributes:
        code: Stable machine-readable name.
        status: The HTTP status this becomes at the edge.
        is_retryable: Whether the same request may succeed if sent again.
        is_public: Whether the message may leave the building. Others become a generic sentence.
        retry_after_s: When the same request may have better luck; 0: not known.
        topic: What `tandem docs` is to be given to learn more; empty: nothing. Told to operators only.
    """

    code = "internal_error"
    status = 500
    is_retryable = False
    is_public = True
    retry_after_s = 0
    topic = ""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    @override
    def __init_subclass__(cls, **facts: str | int | bool) -> None:
        """Set attributes by the class's header: `class TooOld(TandemError, code="too_old", status=400)`."""
        super().__init_subclass__()
        for name, value in facts.items():
            setattr(cls, name, value)

    @override
    def __reduce__(self) -> tuple[Callable[[ErrorInfo], "TandemError"], tuple[ErrorInfo]]:
        # Subclasses make their sentence of other arguments, which a pickle would not find again.
        return error_from_info, (self.info(),)

    def info(self) -> ErrorInfo:
        """Return the travelling form."""
        return ErrorInfo(
            code=self.code,
            message=self.message,
            status=self.status,
            is_retryable=self.is_retryable,
            retry_after_s=self.retry_after_s,
            topic=self.topic,
        )

    @property
    def for_operators(self) -> str:
        """The message, and where to read on."""
        return f"{self.message}\nsee: tandem docs {self.topic}" if self.topic else self.message


class InvalidRequest(TandemError, code="invalid_request", status=400):
    """The request is invalid. A retry does not help."""


class Unauthorized(TandemError, code="unauthorized", status=401):
    """The API key is missing or wrong."""


class ModelNotFound(TandemError, code="model_not_found", status=404):
    """The requested `model` is not served."""

    def __init__(self, asked: str, *served: str) -> None:
        names = ", ".join(map(repr, served))
        super().__init__(f"model {asked!r} is not served here; this cluster serves {names}")


class BodyTooLarge(TandemError, code="body_too_large", status=413):
    """The HTTP body exceeds the limit."""


class Overloaded(TandemError, code="overloaded", status=429, is_retryable=True):
    """The cluster has no room now."""

    def __init__(self, message: str, retry_after_s: int = 0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RateLimited(Overloaded, code="rate_limit_exceeded"):
    """This API key has reached its limit."""


class DeadlinePassed(TandemError, code="deadline_passed", status=504):
    """The request was queued until its client's deadline, and was not started."""


class OutOfPages(TandemError, code="out_of_pages", status=400):
    """The request needs more KV pages than the node's pool has."""

    def __init__(self, needed: int, total: int) -> None:
        super().__init__(
            f"the request needs {needed} pages of KV and the node has {total}; "
            "shorten the prompt or max_new_tokens, or raise --max-total-tokens"
        )


class Aborted(TandemError, code="aborted", status=499, is_retryable=True):
    """The request was cancelled by its client or an operator.

    Or by a node that lost its edge worker: the other node then reports it to one that may try again.
    """


class NoNodeAvailable(TandemError, code="no_node_available", status=503, is_retryable=True):
    """No pair of nodes can serve. The router keeps trying to reach them."""


class NodeDraining(TandemError, code="node_draining", status=503, is_retryable=True):
    """The node is draining: it accepts no new requests, or hands this one over to another node."""


class PeerDraining(NodeDraining, code="peer_draining"):
    """The other node of the pair is draining."""


class AttemptsUsedUp(TandemError, code="attempts_used_up", status=503, is_retryable=True):
    """Every attempt at the request failed with its nodes."""

    def __init__(self, num_attempts: int, last: TandemError) -> None:
        reason = last.message if last.is_public else last.code
        super().__init__(
            f"gave up after {num_attempts} attempts, of which the last ended with: {reason}"
        )


class PeerLost(TandemError, code="peer_lost", status=503, is_retryable=True):
    """The process at the other end of a link died, restarted or cannot be reached."""


class PeerBehind(PeerLost, code="peer_behind"):
    """The process at the other end of a link does not read. Messages to it were dropped."""


class TransferTimeout(TandemError, code="transfer_timeout", status=504, is_retryable=True):
    """The other node of the pair did not take part in time."""


class TransferRefused(TandemError, code="transfer_refused", is_retryable=True):
    """A node refused a write outside of a grant, or a link that it does not know."""


class TransferFailed(TandemError, code="transfer_failed", is_retryable=True, is_public=False):
    """The library of the transport raised an error."""


class KVCorrupted(TandemError, code="kv_corrupted", is_retryable=True):
    """KV pages arrived with wrong bytes."""


class LayoutMismatch(TandemError, code="layout_mismatch", status=503):
    """The prefill and the decode node have different models or KV layouts."""

    topic = "errors#layout_mismatch"

    def __init__(self, prefill: str, decode: str) -> None:
        super().__init__(
            f"prefill serves {prefill} and decode serves {decode}; "
            "start both with the same model, --dtype and --kv-cache-dtype; --tp may differ"
        )


class ProtocolMismatch(TandemError, code="protocol_mismatch", status=503):
    """The prefill and the decode node have no version of the hand-off's protocol in common."""

    def __init__(self, theirs: int, oldest: int, newest: int) -> None:
        super().__init__(
            f"the other node speaks version {theirs} of the hand-off's protocol and this one {oldest} to "
            f"{newest}; run releases on both that are at most one apart"
        )


class EngineFailed(TandemError, code="engine_failed", is_retryable=True):
    """The engine raised an error while it ran the request."""


class MessageInvalid(TandemError, code="message_invalid", is_public=False):
    """A peer sent bytes that are no valid message."""


class MessageTooLarge(MessageInvalid, code="message_too_large"):
    """A message exceeds the channel's limit."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"message of {size_bytes} bytes passes the limit of {limit_bytes}")
        self.size_bytes, self.limit_bytes = size_bytes, limit_bytes


class ConfigInvalid(TandemError, code="config_invalid"):
    """A flag, a path or an address that cannot work; the sentence says what to do."""

    def __init__(self, message: str, topic: str = "") -> None:
        super().__init__(message)
        self.topic = topic


def error_of_far_side(info: ErrorInfo) -> TandemError:
    """Rebuild an error that the other half of an attempt ended with, as this half tells it on."""
    error = error_from_info(info)
    return PeerDraining(error.message) if isinstance(error, NodeDraining) else error


def errors_by_code(base: type[TandemError] = TandemError) -> dict[str, type[TandemError]]:
    """Return every kind of error that this process has imported, by its code."""
    found = {base.code: base}
    for sub in base.__subclasses__():
        found |= errors_by_code(sub)
    return found


def error_from_info(info: ErrorInfo) -> TandemError:
    """Rebuild the exception that `info` describes; an unknown code becomes a `TandemError`.

    Status and retryability are the sender's, so that a newer peer's error keeps its meaning; what is no
    status of an error becomes 500.
    """
    cls = errors_by_code().get(info.code, TandemError)
    error = cls.__new__(cls)
    TandemError.__init__(error, info.message)
    error.code, error.is_retryable = info.code, info.is_retryable
    error.retry_after_s, error.topic = info.retry_after_s, info.topic
    error.status = info.status if 400 <= info.status < 600 else TandemError.status
    return error
