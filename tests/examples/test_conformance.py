"""The second decode half passes the conformance suite, too."""

import contextlib
import queue
import threading

import msgspec
import pytest

from tandem.conformance import test_decode as suite
from tandem.conformance.play import Player
from tandem.conformance.play_prefill import PrefillPlayer
from tandem.wire.channel import DEFAULT_HEARTBEAT, Heartbeat
from tandem.wire.errors import ErrorInfo
from tests.kvtransfer.rig import layout

pytest.importorskip("msgpack")
from examples import decode_half

# A slab of it is larger than the 240 bytes from which the example's sum begins.
SHAPE = msgspec.to_builtins(layout(head_dim=16))
TESTS = [name for name in vars(suite) if name.startswith("test_")]
TIMED = {"test_both_ends_ping", "test_a_prefill_that_falls_silent_is_lost_and_fenced"}


class ExampleUnderTest:
    """The example in a thread of its own: it waits for Welcome, which the player sends later."""

    host, key, page_size = "127.0.0.1", None, SHAPE["page_size"]

    def __init__(self, beat):
        self.beat, self.outcomes = beat, {}
        self._open, self._half, self._jobs = {}, None, queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def start(self, room, num_tokens, host, port):
        self._jobs.put(lambda: self._grant(room, num_tokens, f"tcp://{host}:{port}"))

    def cancel(self, room):
        self._jobs.put(lambda: self._half and self._half.withdraw(room))

    def outcome(self, room):
        return self.outcomes.get(room, "")

    def keep_alive(self):
        """The example's own thread does."""

    def close(self):
        self._jobs.put(None)
        self._thread.join()
        if self._half is not None:
            self._half.close()

    def _grant(self, room, num_tokens, address):
        self._open[room] = []
        if self._half is None:
            self._half = decode_half.DecodeHalf(address, 8, fingerprint="x", layout=SHAPE)
        self._open[room] = self._half.grant(room, num_tokens)

    def _run(self):
        while True:
            try:
                if (job := self._jobs.get(timeout=0.001)) is None:
                    return
                job()
            except queue.Empty:
                self._look()
            except decode_half.LinkLost as lost:
                self._lost(lost)

    def _look(self):
        try:
            for ended in self._half.poll(0.005) if self._half else ():
                reason = (ended.word.get("error") or {}).get("code", "")
                codes = {"landed": "landed", "corrupted": "kv_corrupted"}
                self.outcomes[ended.room] = codes.get(ended.kind, reason)
                pages = self._open.pop(ended.room)
                self._half.free += pages if ended.kind == "landed" else []
        except decode_half.LinkLost as lost:
            self._lost(lost)

    def _lost(self, lost):
        code = lost.answer.get("error", {}).get("code", "peer_lost")
        self.outcomes |= dict.fromkeys(self._open, code)
        self._open.clear()
        self._half = None


@pytest.mark.parametrize("name", TESTS)
def test_the_example_conforms(name, stack, monkeypatch):
    is_timed = name in TIMED
    monkeypatch.setattr(Player, "settle_s", 0.05)
    monkeypatch.setattr(decode_half, "BEAT_S", 0.2 if is_timed else 30.0)
    subject = ExampleUnderTest(Heartbeat(0.2) if is_timed else DEFAULT_HEARTBEAT)
    player = PrefillPlayer(subject)
    stack.callback(player.close)
    stack.callback(subject.close)
    vars(suite)[name](player)
    with contextlib.suppress(AssertionError):  # so that it waits for no Welcome any more
        player.say("Refused", error=ErrorInfo(code="peer_lost", message="the test is over"))
