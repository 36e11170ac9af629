import pytest

from tandem.wire.errors import (
    ErrorInfo,
    KVCorrupted,
    LayoutMismatch,
    OutOfPages,
    TandemError,
    error_from_info,
)


@pytest.mark.parametrize(
    "error", [KVCorrupted("page 3"), LayoutMismatch("a", "b"), OutOfPages(9, 4)]
)
def test_an_error_crosses_a_process_border_with_its_class_and_words(error):
    copy = error_from_info(error.info())
    assert type(copy) is type(error)
    assert copy.info() == error.info()


def test_an_error_of_a_newer_release_keeps_its_status():
    copy = error_from_info(
        ErrorInfo(code="of_tomorrow", message="m", status=418, is_retryable=True)
    )
    assert (type(copy), copy.status, copy.is_retryable) == (TandemError, 418, True)
