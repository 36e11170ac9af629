"""When the load generator takes a response for complete."""

import pytest

from benchmarks.http_load import Plan, _Connection, _Load

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nx-request-id: a0\r\n\r\n"
EVENT = b"8\r\ndata: x\n\r\n"
END = b"0\r\n\r\n"


class Written:
    """A transport that counts the requests written to it."""

    def __init__(self):
        self.num_requests = 0

    def write(self, _request):
        self.num_requests += 1


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    "parts", [[HEAD, EVENT, END], [HEAD + EVENT + END], [HEAD, EVENT + END[:2], END[2:]]]
)
def test_a_head_that_ends_like_a_last_chunk_ends_no_response(is_stream, parts):
    load, transport = _Load(Plan(port=1, path="/", duration_s=1.0)), Written()
    connection = _Connection(load, b"", is_stream=is_stream)
    connection.connection_made(transport)
    for part in parts:
        assert transport.num_requests == 1
        connection.data_received(part)
    assert transport.num_requests == 2
    assert not load._errors
