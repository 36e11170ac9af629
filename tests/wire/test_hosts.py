"""Hosts as people type them."""

import errno
import socket

import pytest

from tandem.wire.errors import ConfigInvalid, PeerLost
from tandem.wire.hosts import bare_host, reason_of, resolve


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "::1", "fe80::1%eth0", "node-1.example.org", "käse.de"]
)
def test_a_host_is_taken_as_it_is(host):
    assert bare_host("--host", host) == host


@pytest.mark.parametrize("host", ["a..b", "x" * 64 + ".org", ".org"])
def test_what_no_resolver_can_be_asked_for_is_refused_with_its_flag(host):
    with pytest.raises(ConfigInvalid, match=r"^--host .*: give an address, or a name"):
        bare_host("--host", host)


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_what_no_resolver_can_be_asked_for_cannot_be_resolved(host):
    with pytest.raises(PeerLost, match=f"^cannot resolve {host}: each part of a name has 1 to 63"):
        resolve(host)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed"), "Connection refused"),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not"),
        (OSError("several addresses failed"), "several addresses failed"),
    ],
)
def test_an_address_that_cannot_be_had_says_why_in_words(error, words):
    assert reason_of(error).startswith(words)
