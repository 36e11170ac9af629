"""A request straight to our nodes, without a router: what is left when its time is taken off.

Run with a `WirePlan` as JSON on standard input; writes latencies in milliseconds as JSON. Both halves are
sent at once, and the answer is whole when decode says so, as at the router.
"""

import sys
import time

import msgspec

from wire.channel import Link, wait
from wire.errors import PeerLost
from wire.generation import GenerateRequest, SamplingParams
from wire.ids import new_request_id, new_room
from wire.messages import FromEngine, Ping, StartDecode, StartPrefill, TokenBatch

# Far below the silence after which a node takes its edge for lost.
PING_EVERY_S = 0.5


class WirePlan(msgspec.Struct, frozen=True, kw_only=True):
    """What to send.

    Attributes:
        ports: Of prefill's engine and of decode's.
        bootstrap_port: Of prefill.
    """

    ports: tuple[int, int]
    bootstrap_port: int
    prompt_ids: list[int]
    new_tokens: int
    duration_s: float
    pause_s: float


def run(plan: WirePlan) -> list[float]:
    """Send one request after the other; return how long each took."""
    prefill, decode = (
        Link[FromEngine](f"tcp://127.0.0.1:{port}", FromEngine) for port in plan.ports
    )
    sampling = SamplingParams(
        max_new_tokens=plan.new_tokens, temperature=0, ignore_eos=True, seed=1
    )
    for link in (prefill, decode):
        while not _is_sent(link):
            time.sleep(0.01)
    latencies_ms: list[float] = []
    end_s, ping_s = time.monotonic() + plan.duration_s, 0.0
    while time.monotonic() < end_s:
        if time.monotonic() > ping_s:
            ping_s = time.monotonic() + PING_EVERY_S
            prefill.send(Ping())
            decode.send(Ping())
        request = GenerateRequest(
            request_id=new_request_id(), prompt_ids=plan.prompt_ids, sampling=sampling
        )
        room, begin_s = new_room(), time.perf_counter()
        prefill.send(StartPrefill(request=request, room=room))
        decode.send(
            StartDecode(
                request=request,
                room=room,
                bootstrap_host="127.0.0.1",
                bootstrap_port=plan.bootstrap_port,
            )
        )
        _await_end(prefill, decode)
        latencies_ms.append((time.perf_counter() - begin_s) * 1000)
        time.sleep(plan.pause_s)
    prefill.close()
    decode.close()
    return latencies_ms


def _await_end(prefill: Link[FromEngine], decode: Link[FromEngine]) -> None:
    """Wait for decode's last token, reading what prefill says."""
    while True:
        wait([prefill, decode], 1.0)
        while prefill.receive() is not None:
            pass
        while (message := decode.receive()) is not None:
            if isinstance(message, TokenBatch) and message.deltas[-1].finish is not None:
                return


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
