import pytest

from tandem.wire.errors import (
    ErrorInfo,
    KVCorrupted,
    LayoutMismatch,
    NodeDraining,
    OutOfPages,
    PeerDraining,
    PeerLost,
    TandemError,
    error_from_info,
    error_of_other_half,
)


@pytest.mark.parametrize(
    "error", [KVCorrupted("page 3"), LayoutMismatch("a", "b"), OutOfPages(9, 4)]
)
def test_error_keeps_class_and_message_between_processes(error):
    copy = error_from_info(error.info())
    assert type(copy) is type(error)
    assert copy.info() == error.info()


def test_error_code_of_newer_release_keeps_status_and_retryability():
    copy = error_from_info(
        ErrorInfo(code="of_tomorrow", message="m", status=418, is_retryable=True)
    )
    assert (type(copy), copy.status, copy.is_retryable) == (TandemError, 418, True)


def test_node_does_not_report_the_drain_of_its_peer_as_its_own():
    assert isinstance(error_of_other_half(NodeDraining("it ends").info()), PeerDraining)
    assert isinstance(error_of_other_half(PeerLost("it died").info()), PeerLost)
