"""Host names from the command line."""

import errno
import socket

import pytest

from tandem.wire.errors import ConfigInvalid, PeerLost
from tandem.wire.hosts import bare_host, reason_of, resolve


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "::1", "fe80::1%eth0", "node-1.example.org", "käse.de"]
)
def test_valid_host_is_returned_unchanged(host):
    assert bare_host("--host", host) == host


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".org", ".org"])
def test_invalid_host_name_is_rejected_naming_the_flag(host):
    with pytest.raises(ConfigInvalid, match=r"^--host .* is not a host: use an address, or a name"):
        bare_host("--host", host)


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_invalid_host_name_cannot_be_resolved(host):
    with pytest.raises(
        PeerLost, match=f"^cannot resolve {host}: each part of a name must have 1 to 63"
    ):
        resolve(host)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"), "Connection refused"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not"),
        (OSError("several addresses failed"), "several addresses failed"),
    ],
)
def test_reason_of_os_error_is_readable(error, words):
    assert reason_of(error).startswith(words)
