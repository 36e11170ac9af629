"""One attempt at a request: both halves, started together and merged as they speak, or all of it on decode."""

import asyncio
from collections.abc import AsyncGenerator, Iterator

from tandem.router.attempt import Progress
from tandem.router.cluster import Cluster
from tandem.router.conditional import tokens_to_compute
from tandem.router.node import Node, Work
from tandem.router.policy import Asked, Pair
from tandem.wire.errors import PeerLost
from tandem.wire.generation import GenerateRequest
from tandem.wire.ids import new_room
from tandem.wire.messages import StartColocated, StartDecode, StartPrefill, TokenDelta


def run_on(
    cluster: Cluster, progress: Progress, pair: Pair, attempt: int
) -> AsyncGenerator[TokenDelta, None]:
    """Yield what an attempt adds to the request, on both nodes of a pair or on decode alone."""
    if pair.prefill:
        return run_attempt(cluster, progress, pair, attempt)
    return run_local_attempt(cluster, progress, pair.decode, attempt)


async def are_alive(cluster: Cluster, pair: Pair) -> bool:
    """Tell whether the nodes of a pair live, as far as it can be known within the time of a heartbeat.

    A router that is cut off loses its nodes one after the other, all within a moment: without a look, each
    of them would cost the same request an attempt.
    """
    clients = [cluster.node(url).client for url in pair.urls]
    return all([client is not None and await client.is_alive() for client in clients])


async def run_attempt(
    cluster: Cluster, progress: Progress, pair: Pair, attempt: int
) -> AsyncGenerator[TokenDelta, None]:
    """Yield what one pair adds to the request. Both halves have ended when it returns.

    Raises:
        TandemError: A half failed before the end; the other is cancelled.
    """
    prefill, decode = cluster.node(pair.prefill), cluster.node(pair.decode)
    request, wake = progress.remaining(), asyncio.Event()
    start_decode, start_prefill = _starts(request, prefill, attempt)
    with (
        decode.start(start_decode, wake) as decode_work,
        prefill.start(start_prefill, wake) as prefill_work,
    ):
        while not progress.is_finished:
            # Once decode has spoken, only its tokens can follow.
            if progress.sent_ids and not prefill_work.is_counted:
                decode_work.stream.tap = progress
            await wake.wait()
            wake.clear()
            decode_work.stream.tap = None
            for node, delta in _arrivals(progress, prefill_work, decode_work):
                if delta.phases:
                    progress.trail.heard(
                        delta.phases, pair.prefill if node is prefill_work else pair.decode
                    )
                if new := progress.accept(delta):
                    yield new
                if progress.is_finished:
                    break
        # A finish that came from prefill is not known to decode, which is cancelled here.
        prefill_work.done()


async def run_local_attempt(
    cluster: Cluster, progress: Progress, url: str, attempt: int
) -> AsyncGenerator[TokenDelta, None]:
    """Yield what a decode node by itself adds to the request. It has ended there when this returns.

    Raises:
        TandemError: The node failed before the end.
    """
    node, wake = cluster.node(url), asyncio.Event()
    start = StartColocated(request=progress.remaining(), attempt=attempt)
    has_spoken = False
    num_cached = Asked.of(start.request).cached_tokens(node.snapshot())
    with node.start(start, wake, tokens_to_compute(start.request, num_cached)) as work:
        while not progress.is_finished:
            if has_spoken:
                work.stream.tap = progress
            await wake.wait()
            wake.clear()
            work.stream.tap = None
            while delta := work.stream.take():
                if delta.token_ids:
                    has_spoken = True
                    work.prompt_done()
                if delta.phases:
                    progress.trail.heard(delta.phases, url)
                if new := progress.accept(delta):
                    yield new
                if progress.is_finished:
                    break


def _starts(
    request: GenerateRequest, prefill: Node, attempt: int
) -> tuple[StartDecode, StartPrefill]:
    """Return the two halves of an attempt, which meet in a room of their own."""
    room = new_room()
    if prefill.bootstrap_port is None:
        raise PeerLost(f"prefill node {prefill.url} tells no bootstrap port any more")
    decode = StartDecode(
        request=request,
        room=room,
        bootstrap_host=prefill.host,
        bootstrap_port=prefill.bootstrap_port,
        attempt=attempt,
    )
    return decode, StartPrefill(request=request, room=room, attempt=attempt)


def _arrivals(progress: Progress, prefill: Work, decode: Work) -> Iterator[tuple[Work, TokenDelta]]:
    """Yield what waits in both streams, prefill's first: it has the first token."""
    while not prefill.is_done and (delta := prefill.stream.take()):
        yield prefill, delta
    # The nodes' links do not keep pace with each other: while prefill owes log-probabilities of the
    # prompt, which come before all tokens, decode's tokens wait. Its failure does not.
    if progress.awaits_prompt_logprobs and prefill.stream.is_open and not decode.stream.is_empty:
        return
    while delta := decode.stream.take():
        # Decode speaks once every page landed: prefill's part is done, and cannot fail any more.
        prefill.done()
        if delta.finish is not None:
            # It may have told since how it fared, which the last delta is to say.
            yield from ((prefill, late) for late in prefill.stream.take_late())
        yield decode, delta
