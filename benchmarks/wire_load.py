"""A request straight to our nodes, without a router: what is left when its time is taken off.

Run with a `WirePlan` as JSON on standard input; writes latencies in milliseconds as JSON. Both halves are
sent at once, and the answer is whole when decode says so, as at the router.
"""

import sys
import time

import msgspec

from tandem.wire.channel import Link, wait
from tandem.wire.errors import PeerLost
from tandem.wire.generation import GenerateRequest, SamplingParams
from tandem.wire.ids import RequestId, new_request_id, new_room
from tandem.wire.messages import FromEngine, Ping, StartDecode, StartPrefill, TokenBatch

# Far below the silence after which a node takes its edge for lost.
PING_EVERY_S = 0.5


class WirePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to send.

    Attributes:
        ports: Of prefill's engine and of decode's.
        bootstrap_port: Of prefill.
        num_streams: Longer requests under way meanwhile, each asked for again when it ended.
    """

    ports: tuple[int, int]
    bootstrap_port: int
    prompt_ids: list[int]
    new_tokens: int
    duration_s: float
    pause_s: float
    num_streams: int = 0
    stream_tokens: int = 0


def run(plan: WirePlan) -> list[float]:
    """Send one request after the other; return how long each took."""
    prefill, decode = (
        Link[FromEngine](f"tcp://127.0.0.1:{port}", FromEngine) for port in plan.ports
    )
    for link in (prefill, decode):
        while not _is_sent(link):
            time.sleep(0.01)
    edge = _Edge(plan, prefill, decode)
    for _ in range(plan.num_streams):
        edge.ask(plan.stream_tokens)
    latencies_ms: list[float] = []
    end_s, ping_s = time.monotonic() + plan.duration_s, 0.0
    while time.monotonic() < end_s:
        if time.monotonic() > ping_s:
            ping_s = time.monotonic() + PING_EVERY_S
            prefill.send(Ping())
            decode.send(Ping())
        begin_s = time.perf_counter()
        edge.await_end(edge.ask(plan.new_tokens))
        latencies_ms.append((time.perf_counter() - begin_s) * 1000)
        time.sleep(plan.pause_s)
    prefill.close()
    decode.close()
    return latencies_ms


class _Edge:
    """What an edge worker does, and no more."""

    def __init__(self, plan: WirePlan, prefill: Link[FromEngine], decode: Link[FromEngine]) -> None:
        self._plan, self._prefill, self._decode = plan, prefill, decode

    def ask(self, new_tokens: int) -> RequestId:
        """Send both halves of a request."""
        sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0, ignore_eos=True, seed=1)
        request = GenerateRequest(
            request_id=new_request_id(), prompt_ids=self._plan.prompt_ids, sampling=sampling
        )
        room = new_room()
        self._prefill.send(StartPrefill(request=request, room=room))
        self._decode.send(
            StartDecode(
                request=request,
                room=room,
                bootstrap_host="127.0.0.1",
                bootstrap_port=self._plan.bootstrap_port,
            )
        )
        return request.request_id

    def await_end(self, request_id: RequestId) -> None:
        """Wait for decode's last token of a request; begin other ones that ended again."""
        has_ended = False
        while not has_ended:
            wait([self._prefill, self._decode], 1.0)
            while self._prefill.receive() is not None:
                pass
            while (message := self._decode.receive()) is not None:
                ended = [
                    delta.request_id
                    for delta in (message.deltas if isinstance(message, TokenBatch) else ())
                    if delta.finish is not None
                ]
                has_ended = has_ended or request_id in ended
                for _ in range(len(ended) - (request_id in ended)):
                    self.ask(self._plan.stream_tokens)


def _is_sent(link: Link[FromEngine]) -> bool:
    try:
        link.send(Ping())
    except PeerLost:  # not connected yet
        return False
    return True


def main() -> None:
    """Do one plan."""
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=WirePlan)
    sys.stdout.buffer.write(msgspec.json.encode(run(plan)))


if __name__ == "__main__":
    main()
