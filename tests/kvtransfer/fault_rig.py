"""Nodes in processes and namespaces of their own, and the words a test says to them."""

from multiprocessing import Pipe
from pathlib import Path

from tests.fork_server import Forked

FAR_NODE = "tests.kvtransfer.far_node"
# Only a guard against a hang: nothing waits this long in a run that is well.
GUARD_S = 120.0
LOCAL = "127.0.0.1"


class FarNode:
    """A process of `far_node.py`.

    Args:
        namespace: A file of the network namespace that it runs in; empty for ours.
        mood: `alert` where a test is about silence.
    """

    def __init__(self, kind, transport, directory, host=LOCAL, namespace="", mood="calm"):
        self._link, theirs = Pipe()
        self.kind, self.host, self.port, self.region = kind, host, 0, ""
        argv = [FAR_NODE, kind, transport, host, str(directory), mood]
        self.process = Forked(argv, stdin=theirs.fileno(), namespace=namespace)
        theirs.close()
        self._lines = []

    def ready(self):
        """Wait until it is up."""
        line = self.next()
        self.port, self.region = line.get("port", 0), line.get("region", "")
        return self

    def do(self, what, **arguments):
        self._link.send({"do": what, **arguments})

    def next(self, within_s=GUARD_S):
        """Return the next thing it reports; None when it reports none in time."""
        if self._lines:
            return self._lines.pop(0)
        try:
            return self._link.recv() if self._link.poll(within_s) else None
        except (EOFError, ConnectionError) as error:
            status = self.process.wait()
            raise AssertionError(f"{self.kind} ended with status {status}") from error

    def hear(self, event, room, within_s=GUARD_S):
        """Wait for the next event of a room, which must be this. Those of other rooms are kept."""
        others = []
        while (line := self.next(within_s)) is not None:
            is_asked = event == "Bytes" or line.get("event") != "Bytes"
            if line.get("room") == room and is_asked:
                self._lines = others + self._lines
                assert line["event"] == event, line
                return line
            others.append(line)
        raise AssertionError(f"{self.kind} did not say {event} of {room} in {within_s} s: {others}")

    def answer(self, what):
        """Wait for an answer. What is told meanwhile is kept."""
        others = []
        while (line := self.next()) is not None:
            if line.get("answer") == what:
                self._lines = others + self._lines
                return line
            others.append(line)
        raise AssertionError(f"{self.kind} did not answer {what} in {GUARD_S} s: {others}")

    def report(self):
        self.do("report")
        return self.answer("report")

    def signal(self, number):
        self.process.send_signal(number)

    def close(self):
        """End it, whatever became of it."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._link.close()
        if self.region:  # a killed node cannot remove its own
            region = Path(self.region)
            for path in [region, *region.parent.glob(region.stem + ".*")]:
                path.unlink(missing_ok=True)


def begin_push(prefill, decode, room):
    """Request a room of both, and return when bytes are landing and go on doing so."""
    prefill.do("push", room=room)
    decode.do("request", room=room, host=prefill.host, port=prefill.port)
    prefill.hear("Granted", room)
    decode.hear("Bytes", room)


def hand_off(prefill, decode, room):
    """Do one from beginning to end, and compare the bytes."""
    begin_push(prefill, decode, room)
    prefill.do("finish", room=room)
    prefill.hear("PushDone", room)
    decode.hear("Landed", room)
    assert decode.answer("pages")["is_equal"]
