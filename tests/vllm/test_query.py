"""Requests of proxies that were written for MooncakeConnector."""

import contextlib
import json
import socket
import urllib.error
import urllib.request

import pytest

from tandem.vllm.hand_offs import room_of, source_of
from tandem.vllm.query import QueryServer
from tandem.wire.errors import ConfigInvalid

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-1"}
DECODE = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "transfer_id": "xfer-1",
    "remote_bootstrap_addr": "http://10.0.0.1:9000",
    "remote_engine_id": "tandem:8998",
}


@pytest.fixture
def server():
    with contextlib.closing(QueryServer("127.0.0.1", 0, 8998)) as server:
        yield server


def test_decode_finds_prefill_by_what_it_answers_to_a_query(server):
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/query", timeout=10) as answer:
        engine = json.load(answer)["0"]["engine_id"]
    source = source_of(DECODE | {"remote_engine_id": engine})
    assert (source.host, source.port) == ("10.0.0.1", 8998)


def test_other_paths_are_not_found(server):
    with pytest.raises(urllib.error.HTTPError, match="404") as raised:
        urllib.request.urlopen(f"http://127.0.0.1:{server.port}/register", timeout=10)
    raised.value.close()


def test_both_halves_of_a_transfer_use_one_room():
    assert room_of(PREFILL) == source_of(DECODE).room == room_of(DECODE)
    assert room_of(PREFILL | {"transfer_id": "xfer-2"}) != room_of(PREFILL)
    assert source_of(PREFILL) is None


@pytest.mark.parametrize(
    "fields",
    [
        {"remote_engine_id": "0f3c"},
        {"remote_engine_id": "tandem:"},
        {"remote_engine_id": "tandem:²"},
        {"remote_engine_id": 8998},
        {"remote_bootstrap_addr": "10.0.0.1"},
        {"remote_bootstrap_addr": "http://[::1"},
        {"do_remote_prefill": False},
    ],
)
def test_decode_computes_a_prompt_whose_source_is_not_ours(fields):
    assert source_of(DECODE | fields) is None


def test_port_in_use_is_reported_with_a_remedy():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigInvalid, match=f"query_port {port} .* in use; set a free one"):
            QueryServer("127.0.0.1", port, 8998)
