"""Failed handshakes and lost connections of a socket, from libzmq's monitor.

A rejected peer never delivers a message, so the layers above the socket would not notice it. libzmq does
not identify the peer: the connecting end knows the address and logs it.
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
# Constants of zmq.h that pyzmq does not export.
CRYPTOGRAPHIC, MECHANISM_MISMATCH = 0x11000001, 0x11000002
HUNG_UP = "the other end hung up during the handshake; most likely its TANDEM_CLUSTER_KEY differs from ours"
# A misconfigured node retries every second.
LOG_INTERVAL_S = 60.0


def _reason_of(event: Mapping[str, Any], *, has_key: bool) -> str:
    """Return why a handshake failed, in words an operator can act on."""
    if event["value"] == MECHANISM_MISMATCH:
        return (
            "this end has a TANDEM_CLUSTER_KEY and the other has none"
            if has_key
            else "the other end has a TANDEM_CLUSTER_KEY and this one has none"
        )
    if event["value"] == CRYPTOGRAPHIC:
        return "the other end has a different TANDEM_CLUSTER_KEY"
    if event["event"] == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        return "the other end speaks a different protocol"
    # When keys differ, the connecting end sees only a hang-up. When only one end has a key, the end that notices it
    # second sees only a hang-up.
    return HUNG_UP


class Handshakes:
    """Counts the failed handshakes of one socket. Belongs to the socket's thread.

    Attributes:
        monitor: Monitor socket; readable when `poll` has something to read.
        num_failed: Failed handshakes so far.
        reason: Reason of the last failure, preferring a definite one to `HUNG_UP`; empty before the first.
        num_lost: Connections lost so far, and failed handshakes.
    """

    def __init__(self, sock: zmq.Socket[Any], *, has_key: bool) -> None:
        self._socket, self._has_key = sock, has_key
        address = f"inproc://{secrets.token_hex(8)}"  # unique in this process
        sock.monitor(address, FAILED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED)
        self.monitor: zmq.Socket[bytes] = sock.context.socket(zmq.PAIR)
        # No limit: at a full queue libzmq's I/O thread would block, and with it every link of this process.
        self.monitor.setsockopt(zmq.RCVHWM, 0)
        self.monitor.connect(address)
        self._silent_until_s = float("-inf")
        self._num_logged = 0
        self.num_failed, self.reason, self.num_lost = 0, "", 0

    def poll(self) -> None:
        """Process the events since the last call."""
        with contextlib.suppress(zmq.Again):
            while True:
                self._process(parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK)))

    def wait_closed(self, timeout_s: float) -> None:
        """Wait until a bound socket's port is closed, for at most `timeout_s`."""
        while self.monitor.poll(int(timeout_s * 1000)):
            event = parse_monitor_message(self.monitor.recv_multipart())
            if event["event"] == zmq.EVENT_CLOSED:
                return
            self._process(event)

    def wait_lost(self, num: int, timeout_s: float) -> None:
        """Wait until this many more connections are lost, for at most `timeout_s`."""
        self.poll()
        num_lost, deadline_s = self.num_lost + num, time.monotonic() + timeout_s
        while self.num_lost < num_lost and self.monitor.poll(
            max(0, int(1000 * (deadline_s - time.monotonic())))
        ):
            self.poll()

    def _process(self, event: Mapping[str, Any]) -> None:
        self.num_lost += event["event"] == zmq.EVENT_DISCONNECTED
        if event["event"] & FAILED:
            self.num_failed += 1
            reason = _reason_of(event, has_key=self._has_key)
            if reason != HUNG_UP or not self.reason:
                self.reason = reason

    def log_failures(self, address: str) -> None:
        """Log failures at a bound address: the first at once, later ones as a sum once a minute."""
        num_new, now_s = self.num_failed - self._num_logged, time.monotonic()
        if num_new and now_s >= self._silent_until_s:
            self._num_logged, self._silent_until_s = self.num_failed, now_s + LOG_INTERVAL_S
            # Port probes hang up too, which is nothing an operator must act on.
            write = log.debug if self.reason == HUNG_UP else log.warning
            write("link.refused", address=address, num_times=num_new, reason=self.reason)

    def close(self) -> None:
        """Stop monitoring. Call it before the socket is closed. Safe to call twice."""
        if not self.monitor.closed:
            self._socket.disable_monitor()
            self.monitor.close(linger=0)
