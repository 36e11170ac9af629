"""Errors, named by phase and fault, with their HTTP status and whether a retry helps.

A class may build its message from its arguments. `ErrorInfo` is the form that processes exchange;
`error_from_info` turns it back into an exception of the same class.
"""

from collections.abc import Callable

import msgspec
from typing_extensions import override

from tandem.settings.flags import SettingInvalid


class ErrorInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The form of an error that processes exchange; see `TandemError`."""

    code: str
    message: str
    status: int = 500
    is_retryable: bool = False
    retry_after_s: int = 0
    topic: str = ""


class TandemError(Exception):
    """Base of every error that Tandem raises on purpose.

    Attributes:
        code: Stable machine-readable name.
        status: HTTP status of the response to the client.
        is_retryable: Whether the same request may succeed if sent again.
        is_public: Whether clients may see the message; otherwise they get a generic one.
        retry_after_s: Seconds after which a retry is likely to succeed; 0: unknown.
        topic: Page of the documentation, such as `docs/transports.md#flags`; shown to operators only.
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
        """Set class attributes from the header: `class TooOld(TandemError, code="too_old", status=400)`."""
        super().__init_subclass__()
        for name, value in facts.items():
            setattr(cls, name, value)

    @override
    def __reduce__(self) -> tuple[Callable[[ErrorInfo], "TandemError"], tuple[ErrorInfo]]:
        # Subclasses take different constructor arguments, which a default pickle does not store.
        return error_from_info, (self.info(),)

    def info(self) -> ErrorInfo:
        """Return the form that processes exchange."""
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
        """The message, and the documentation page if there is one."""
        return f"{self.message}\nMore: {self.topic}" if self.topic else self.message


class InvalidRequest(TandemError, code="invalid_request", status=400):
    """The request is invalid. A retry does not help."""


class Unauthorized(TandemError, code="unauthorized", status=401):
    """The API key is missing or wrong."""


class ModelNotFound(TandemError, code="model_not_found", status=404):
    """The requested `model` is not served."""

    def __init__(self, model: str, *served: str) -> None:
        names = ", ".join(map(repr, served))
        super().__init__(f"model {model!r} is not served here; this cluster serves {names}")


class AdapterNotFound(TandemError, code="adapter_not_found", status=404):
    """There is no LoRA adapter of this name, or no files to load it from."""

    def __init__(self, name: str, path: str = "") -> None:
        # vLLM's words
        super().__init__(
            f"Loading lora {name} failed: No adapter found for {path}"
            if path
            else f"The lora adapter '{name}' cannot be found."
        )


class AdapterLoaded(InvalidRequest, code="adapter_loaded"):
    """The name of the LoRA adapter to load is in use."""

    def __init__(self, name: str) -> None:
        # vLLM's words
        super().__init__(
            f"The lora adapter '{name}' has already been loaded. If you want to load the adapter in place, set "
            "'load_inplace' to True."
        )


class AdapterGone(TandemError, code="adapter_gone", status=503, is_retryable=True):
    """The request's LoRA adapter was unloaded or replaced, and the request can neither start nor continue."""

    def __init__(self, adapter: str) -> None:
        super().__init__(f"adapter {adapter!r} was unloaded or replaced; send the request again")


class BodyTooLarge(TandemError, code="body_too_large", status=413):
    """The HTTP body exceeds the limit."""


class Overloaded(TandemError, code="overloaded", status=429, is_retryable=True):
    """The cluster is at capacity."""

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
            f"the request needs {needed} KV pages and the node has {total}; "
            "shorten the prompt or max_new_tokens, or raise --max-total-tokens"
        )


class Aborted(TandemError, code="aborted", status=499, is_retryable=True):
    """The request was cancelled by its client, an operator, or a node that lost its edge worker.

    In the last case the other node of the pair reports the error, and its edge worker may retry.
    """


class NoNodeAvailable(TandemError, code="no_node_available", status=503, is_retryable=True):
    """No pair of nodes is available. The router keeps trying to reach them."""


class NodeDraining(TandemError, code="node_draining", status=503, is_retryable=True):
    """The node is draining: it accepts no new requests, or hands this one over to another node."""


class PeerDraining(NodeDraining, code="peer_draining"):
    """The other node of the pair is draining."""


class AttemptsUsedUp(TandemError, code="attempts_used_up", status=503, is_retryable=True):
    """Every attempt of the request failed because a node failed."""

    def __init__(self, num_attempts: int, last: TandemError) -> None:
        reason = last.message if last.is_public else last.code
        super().__init__(f"gave up after {num_attempts} attempts; the last error was: {reason}")


class RequestEndedEngine(TandemError, code="request_ended_engine", status=500):
    """Several nodes were lost while computing this prompt. The router refuses the prompt for five minutes."""


class PeerLost(TandemError, code="peer_lost", status=503, is_retryable=True):
    """The process at the other end of a link died, restarted or cannot be reached."""


class PeerBehind(PeerLost, code="peer_behind"):
    """The process at the other end of a link stopped reading. Messages to it were dropped."""


class TransferTimeout(TandemError, code="transfer_timeout", status=504, is_retryable=True):
    """The other node of the pair did not do its part in time."""


class TransferRefused(TandemError, code="transfer_refused", is_retryable=True):
    """A node refused a write outside a grant, or on an unknown link."""


class TransferFailed(TandemError, code="transfer_failed", is_retryable=True, is_public=False):
    """The transport's library raised an error."""


class KVCorrupted(TandemError, code="kv_corrupted", is_retryable=True):
    """KV pages arrived with wrong bytes."""


class LayoutMismatch(TandemError, code="layout_mismatch", status=503):
    """The prefill and the decode node have different models or KV layouts.

    Args:
        prefill, decode: What they serve.
        why: Why they must have the same number of ranks, and what to set; empty: their numbers are equal or may differ.
    """

    topic = "docs/reference/errors.md#layout_mismatch"

    def __init__(self, prefill: str, decode: str, why: str = "") -> None:
        remedy = (
            "start both with the same model, --dtype and --kv-cache-dtype, and with the same sizes where a name ends in "
            "-tpN or -ppN; --tp may differ otherwise"
        )
        super().__init__(f"prefill serves {prefill} and decode serves {decode}; {why or remedy}")


class ProtocolMismatch(TandemError, code="protocol_mismatch", status=503):
    """The prefill and the decode node speak different versions of the hand-off protocol."""

    def __init__(self, theirs: int, ours: int) -> None:
        super().__init__(
            f"the other node speaks version {theirs} of the hand-off protocol and this node version "
            f"{ours}; run the same release on both nodes"
        )


class EngineFailed(TandemError, code="engine_failed", is_retryable=True):
    """The engine raised an error while it ran the request."""


class MessageInvalid(TandemError, code="message_invalid", is_public=False):
    """A peer sent bytes that are not a valid message."""


class MessageTooLarge(MessageInvalid, code="message_too_large"):
    """A message exceeds the channel's limit."""

    def __init__(self, size_bytes: int, limit_bytes: int) -> None:
        super().__init__(f"message of {size_bytes} bytes exceeds the limit of {limit_bytes}")
        self.size_bytes, self.limit_bytes = size_bytes, limit_bytes


class ConfigInvalid(TandemError, SettingInvalid, code="config_invalid"):
    """A flag, path or address is invalid. The message says what to do."""

    def __init__(self, message: str, topic: str = "") -> None:
        super().__init__(message)
        self.topic = topic


def error_of_other_half(info: ErrorInfo) -> TandemError:
    """Rebuild the error of an attempt's other half. `NodeDraining` of that node becomes `PeerDraining` here."""
    error = error_from_info(info)
    return PeerDraining(error.message) if isinstance(error, NodeDraining) else error


def errors_by_code(base: type[TandemError] = TandemError) -> dict[str, type[TandemError]]:
    """Return every error class that this process has imported, by code."""
    found = {base.code: base}
    for sub in base.__subclasses__():
        found |= errors_by_code(sub)
    return found


def error_from_info(info: ErrorInfo) -> TandemError:
    """Rebuild the exception that `info` describes; an unknown code becomes a `TandemError`.

    Status and retryability come from the sender, so that an error of a newer peer keeps its meaning. A status
    outside 400 ... 599 becomes 500.
    """
    cls = errors_by_code().get(info.code, TandemError)
    error = cls.__new__(cls)
    TandemError.__init__(error, info.message)
    error.code, error.is_retryable = info.code, info.is_retryable
    error.retry_after_s, error.topic = info.retry_after_s, info.topic
    error.status = info.status if 400 <= info.status < 600 else TandemError.status
    return error
