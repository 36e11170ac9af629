"""What libzmq reports of a socket that is watched: handshakes that failed, and why, and lost connections.

A peer that is turned away never gets a message through, so nobody above the socket would hear of it.
libzmq does not name the peer: the end that connects knows whom it tried, and logs it.
"""

import contextlib
import secrets
import time
from collections.abc import Mapping
from typing import Any

import zmq
from zmq.utils.monitor import parse_monitor_message

from tandem.telemetry.log import get_logger

log = get_logger(__name__)

FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
# Values of zmq.h, which pyzmq has no names for.
CRYPTOGRAPHIC, MECHANISM_MISMATCH = 0x11000001, 0x11000002
HUNG_UP = "the other end hung up in the middle of the handshake, as it does when its TANDEM_CLUSTER_KEY is not ours"
# A misconfigured node tries every second for as long as it runs.
LOG_INTERVAL_S = 60.0


def _reason_of(event: Mapping[str, Any], *, has_key: bool) -> str:
    """Return why a handshake failed, as an operator can act on it."""
    if event["value"] == MECHANISM_MISMATCH:
        return (
            "this end has a TANDEM_CLUSTER_KEY and the other has none"
            if has_key
            else "the other end has a TANDEM_CLUSTER_KEY and this one has none"
        )
    if event["value"] == CRYPTOGRAPHIC:
        return "the other end has another TANDEM_CLUSTER_KEY"
    if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return "the other end speaks something else"
    # All that the end that connects learns of another key, and either end when the other was the first
    # to see that only one of them has any.
    return HUNG_UP


class Handshakes:
    """Counts the failed handshakes of one socket. Belongs to the thread that has the socket.

    Attributes:
        monitor: Readable when there is something to `look` at.
        num_failed: So far.
        reason: Of the last one that has a definite one; empty before the first.
        is_lost: Whether a connection that stood was lost.
    """

    def __init__(self, sock: zmq.Socket[Any], *, has_key: bool) -> None:
        self._socket, self._has_key = sock, has_key
        address = f"inproc://{secrets.token_hex(8)}"  # of all sockets of this process
        sock.monitor(address, FAILED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED)
        self.monitor: zmq.Socket[bytes] = sock.context.socket(zmq.PAIR)
        # Without a limit: at one, libzmq's I/O thread would wait for us, and with it all links of this process.
        self.monitor.setsockopt(zmq.RCVHWM, 0)
        self.monitor.connect(address)
        self._silent_until_s = float("-inf")
        self._num_logged = 0
        self.num_failed, self.reason, self.is_lost = 0, "", False

    def look(self) -> None:
        """Take in what has happened since the last look."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._take(parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK)))

    def wait_closed(self, timeout_s: float) -> None:
        """Return when the port of a bound socket is closed, or the time is up."""
        while self.monitor.poll(int(timeout_s * 1000)):
            event = parse_monitor_message(self.monitor.recv_multipart())
            if event["event"] == zmq.EVENT_CLOSED:
                return
            self._take(event)

    def _take(self, event: Mapping[str, Any]) -> None:
        self.is_lost |= event["event"] == zmq.EVENT_DISCONNECTED
        if event["event"] & FAILED:
            self.num_failed += 1
            reason = _reason_of(event, has_key=self._has_key)
            if reason != HUNG_UP or not self.reason:
                self.reason = reason

    def log_failures(self, address: str) -> None:
        """Log what has failed at a bound address: at once, then together once a minute."""
        num_new, now_s = self.num_failed - self._num_logged, time.monotonic()
        if num_new and now_s >= self._silent_until_s:
            self._num_logged, self._silent_until_s = self.num_failed, now_s + LOG_INTERVAL_S
            # Probes of ports hang up, too: no reason to wake anybody.
            tell = log.debug if self.reason == HUNG_UP else log.warning
            tell("link.refused", address=address, num_times=num_new, reason=self.reason)

    def close(self) -> None:
        """Stop watching. Before the socket is closed; safe to call twice."""
        if not self.monitor.closed:
            self._socket.disable_monitor()
            self.monitor.close(linger=0)
