import asyncio
import json
import math
import random
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from tandem.router.config import PrefillTarget, RouterConfig
from tandem.router.membership.membership import Announcement, Membership
from tandem.router.nodes import watch
from tandem.router.nodes.cluster import Cluster
from tandem.router.pairing.policy import POLICIES
from tandem.router.serving import suspects
from tandem.router.serving.backend import ClusterBackend
from tandem.router.serving.suspects import KEPT_S, name_of
from tandem.wire.errors import (
    Aborted,
    AttemptsUsedUp,
    DeadlinePassed,
    EngineFailed,
    InvalidRequest,
    KVCorrupted,
    NodeDraining,
    NoNodeAvailable,
    Overloaded,
    PeerDraining,
    PeerLost,
    RequestEndedEngine,
    TandemError,
)
from tandem.wire.generation import LogprobOptions, Phase
from tandem.wire.messages import (
    Cancel,
    FlushCache,
    NodeLoad,
    Pong,
    StartDecode,
    StartPrefill,
    TokenBatch,
)
from tandem.wire.prefixes import block_names
from tests.patience import PATIENCE_S, until_async
from tests.receivers import Receiver, deltas
from tests.router.fake_node import FakeNode, logprobs, request


@asynccontextmanager
async def watched(
    prefills, decodes, max_attempts=3, node_wait_s=0.0, policy="least_load", **fields
):
    config = RouterConfig(
        prefills=tuple(PrefillTarget(node.url) for node in prefills),
        decodes=tuple(node.url for node in decodes),
        **fields,
    )
    cluster = Cluster(config)
    rng = random.Random(0)
    backend = ClusterBackend(
        cluster,
        POLICIES[policy],
        max_attempts,
        rng,
        node_wait_s,
        replays_sampled=config.replay_sampled == "allow",
    )
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(cluster.run())
        yield backend
        watching.cancel()


class Setup:
    """Some nodes and a backend over them."""

    def __init__(self, prefills, decodes, backend) -> None:
        self.prefills, self.decodes, self.backend = prefills, decodes, backend
        self.membership = Membership(backend._cluster.members.members)

    def announce(self, url, **fields) -> None:
        """Announce or remove a node, as over HTTP."""
        self.membership.announce(Announcement(url=url, **fields))
        self.backend._cluster.apply(self.membership.members())

    def others(self, node):
        (other,) = [
            n for n in (self.prefills if node in self.prefills else self.decodes) if n != node
        ]
        return other

    async def pair_of(self, attempt=0):
        """Return the nodes that one attempt was started on, with the messages they got."""
        engines = self.prefills + self.decodes
        await until_async(lambda: sum(not n.engine.is_idle() for n in engines) == 2)
        prefill, decode = [n for n in engines if not n.engine.is_idle()]
        start_prefill = await prefill.engine.next(StartPrefill)
        start_decode = await decode.engine.next(StartDecode)
        assert start_prefill.attempt == start_decode.attempt == attempt
        return prefill, start_prefill, decode, start_decode


@asynccontextmanager
async def cluster(num_prefills=1, num_decodes=1, prefills=None, decodes=None, **settings):
    prefills = prefills or [FakeNode("prefill") for _ in range(num_prefills)]
    decodes = decodes or [FakeNode("decode") for _ in range(num_decodes)]
    async with AsyncExitStack() as stack:
        for node in prefills + decodes:
            await stack.enter_async_context(node.serving())
        backend = await stack.enter_async_context(watched(prefills, decodes, **settings))
        nodes = backend._cluster.prefills + backend._cluster.decodes
        await until_async(lambda: all(node.is_up for node in nodes))
        yield Setup(prefills, decodes, backend)


class Reader:
    """A client's side of one request, read in a task."""

    def __init__(self, tasks, backend, generate_request) -> None:
        self.token_ids, self.finish = [], None
        self.logprobs, self.prompt_logprobs, self.phases = [], [], []
        self.task = tasks.create_task(self._read(backend, generate_request))

    async def _read(self, backend, generate_request):
        async for part in deltas(backend, generate_request):
            assert part.index == generate_request.num_prior_tokens + len(self.token_ids)
            self.token_ids += part.token_ids
            self.logprobs += part.logprobs
            self.prompt_logprobs += part.prompt_logprobs
            self.phases += part.phases
            self.finish = part.finish and part.finish.reason

    async def result(self):
        async with asyncio.timeout(PATIENCE_S):
            await self.task
        return self.token_ids, self.finish


@asynccontextmanager
async def reading(setup, generate_request=None):
    async with asyncio.TaskGroup() as tasks:
        yield Reader(tasks, setup.backend, generate_request or request())


async def begun(setup, reader, reason=None):
    """Have prefill send the first token, 10; return the nodes of the attempt with the messages they got."""
    pair = await setup.pair_of()
    prefill, start_prefill, _, _ = pair
    prefill.engine.say(start_prefill, 0, [10], reason)
    await until_async(lambda: reader.token_ids == [10])
    return pair


async def read(backend, generate_request=None):
    return [part async for part in deltas(backend, generate_request or request())]


def decode_streams(setup):
    """What the router reads from decode nodes now."""
    clients = [node.client for node in setup.backend._cluster.decodes]
    return [stream for client in clients for stream in client._streams.values()]


def in_flight(setup) -> list[tuple[int, int]]:
    cluster_nodes = setup.backend._cluster.prefills + setup.backend._cluster.decodes
    return [(node.entry.in_flight_requests, node.entry.in_flight_tokens) for node in cluster_nodes]


async def test_first_token_comes_from_prefill_and_the_rest_from_decode():
    async with cluster() as setup, reading(setup) as reader:
        prefill, start_prefill, decode, start_decode = await setup.pair_of()
        assert start_prefill.room == start_decode.room
        assert (start_decode.bootstrap_host, start_decode.bootstrap_port) == ("127.0.0.1", 8998)
        prefill.engine.say(start_prefill, 0, [10])
        await until_async(lambda: reader.token_ids == [10])
        assert in_flight(setup) == [(1, 3), (1, 3)]
        decode.engine.say(start_decode, 0, [10, 11])
        await until_async(lambda: reader.token_ids == [10, 11])
        assert in_flight(setup) == [(0, 0), (1, 3)]
        decode.engine.say(start_decode, 2, [12], "length")
        assert await reader.result() == ([10, 11, 12], "length")
        assert in_flight(setup) == [(0, 0), (0, 0)]


async def test_finished_request_sends_no_cancel():
    async with cluster() as setup, reading(setup) as reader:
        prefill, start_prefill, decode, start_decode = await setup.pair_of()
        prefill.engine.say(start_prefill, 0, [10], "handed_off")
        decode.engine.say(start_decode, 0, [10, 11], "stop")
        await reader.result()
        await setup.backend.flush_cache()
        await prefill.engine.next(FlushCache)
        await decode.engine.next(FlushCache)


async def test_finish_at_the_first_token_cancels_decode():
    async with cluster() as setup, reading(setup) as reader:
        prefill, start_prefill, decode, _ = await setup.pair_of()
        prefill.engine.say(start_prefill, 0, [2], "stop")
        assert await reader.result() == ([2], "stop")
        await decode.engine.next(Cancel)


async def test_failed_prefill_is_replayed_on_a_different_node():
    async with cluster(num_prefills=2) as setup, reading(setup) as reader:
        prefill, start_prefill, decode, _ = await setup.pair_of()
        prefill.engine.fail(start_prefill, EngineFailed("bad luck"))
        await decode.engine.next(Cancel)
        second, start_prefill, decode, start_decode = await setup.pair_of(attempt=1)
        assert second == setup.others(prefill)
        assert start_prefill.request == request()
        second.engine.say(start_prefill, 0, [10])
        decode.engine.say(start_decode, 0, [10, 11], "stop")
        assert await reader.result() == ([10, 11], "stop")
        assert 'replays_total{error="engine_failed"} 1.0' in setup.backend.metrics()


async def test_decode_is_released_if_the_attempt_cannot_begin_on_prefill(monkeypatch):
    async with cluster(max_attempts=1) as setup:
        (prefill,) = setup.backend._cluster.prefills

        def broken(_start, _on_change):
            raise PeerLost("the link broke")

        monkeypatch.setattr(prefill.client, "generate", broken)
        assert "the link broke" in (await raised(setup.backend)).message
        assert in_flight(setup) == [(0, 0), (0, 0)]
        await setup.decodes[0].engine.next(StartDecode)
        await setup.decodes[0].engine.next(Cancel)


async def serve(setup, reader, attempt=0):
    prefill, start_prefill, decode, start_decode = await setup.pair_of(attempt)
    prefill.engine.say(start_prefill, 0, [10], "handed_off")
    decode.engine.say(start_decode, 0, [10, 11], "stop")
    assert await reader.result() == ([10, 11], "stop")
    return prefill


async def test_node_with_consecutive_failures_is_avoided_while_a_different_one_serves():
    """It fails them at once, and so has less to do than any other."""
    async with cluster(num_prefills=2) as setup:
        broken, served_by = setup.prefills[0], []
        failing = next(node for node in setup.backend._cluster.prefills if node.url == broken.url)
        while not failing.is_aside:
            async with reading(setup) as reader:
                await until_async(lambda: any(not n.engine.is_idle() for n in setup.prefills))
                if broken.engine.is_idle():
                    await serve(setup, reader)
                    continue
                _, start_prefill, decode, _ = await setup.pair_of()
                broken.engine.fail(start_prefill, EngineFailed("bad luck"))
                await decode.engine.next(Cancel)
                await serve(setup, reader, attempt=1)
        assert failing.failures.num_failed == 3
        for _ in range(6):
            async with reading(setup) as reader:
                served_by.append(await serve(setup, reader))
        assert broken not in served_by
        assert f"prefill {broken.url} is put aside" in setup.backend.health().detail
        failing.failures._aside_until_s = 0.0
        # Though it has nothing to do, and reports nothing new.
        await until_async(lambda: not setup.backend._cluster.node(broken.url).entry.is_aside)


async def test_last_node_is_used_despite_failures_and_its_error_is_returned():
    async with cluster(max_attempts=1) as setup:
        for _ in range(5):
            async with asyncio.TaskGroup() as tasks:
                asked = tasks.create_task(raised(setup.backend))
                prefill, start_prefill, decode, _ = await setup.pair_of()
                prefill.engine.fail(start_prefill, EngineFailed("bad luck"))
                await decode.engine.next(Cancel)
            assert "bad luck" in asked.result().message
        async with reading(setup) as reader:
            await serve(setup, reader)  # well again
        assert not setup.backend._cluster.prefills[0].is_aside


class BrokenDirect:
    def take_ordinary_at(self, index, token_ids):
        raise KeyError(index)


async def test_router_bug_in_token_handling_puts_no_node_aside():
    async with cluster() as setup:
        nodes = setup.backend._cluster.prefills + setup.backend._cluster.decodes
        for _ in range(4):
            async with asyncio.TaskGroup() as tasks:
                asked = tasks.create_task(raised(setup.backend))
                prefill, _, decode, start_decode = await setup.pair_of()
                (stream,) = decode_streams(setup)
                stream.direct = BrokenDirect()
                decode.engine.send(
                    TokenBatch(
                        epoch=decode.engine.epoch,
                        deltas=[],
                        streams=[start_decode.stream],
                        indexes=[0],
                        token_ids=[10],
                    ),
                    start_decode,
                )
                await prefill.engine.next(Cancel)
                await decode.engine.next(Cancel)
            assert asked.result().code == "internal_error"
        assert [node.failures.num_failed for node in nodes] == [0, 0]


async def raised(backend) -> TandemError:
    with pytest.raises(TandemError) as raised:
        await read(backend)
    return raised.value


@pytest.mark.parametrize("num_decodes", [1, 2])
async def test_corrupted_pages_are_recomputed_without_the_client_noticing(
    num_decodes,
):
    async with cluster(num_decodes=num_decodes) as setup, reading(setup) as reader:
        prefill, start_prefill, decode, start_decode = await begun(setup, reader, "handed_off")
        decode.engine.fail(start_decode, KVCorrupted("1 of 3 pages"))
        prefill, start_prefill, other, start_decode = await setup.pair_of(attempt=1)
        assert (other == decode) == (num_decodes == 1)
        assert start_prefill.request.prompt_ids == [1, 2, 3, 10]
        prefill.engine.say(start_prefill, 1, [11], "handed_off")
        other.engine.say(start_decode, 1, [11, 12], "stop")
        assert await reader.result() == ([10, 11, 12], "stop")
        replays = 'tandem_router_replays_total{error="kv_corrupted"} 1.0'
        assert replays in setup.backend.metrics()


async def test_attempt_aborted_by_the_peer_node_is_replayed():
    async with cluster(num_decodes=2) as setup, reading(setup) as reader:
        prefill, _, decode, start_decode = await setup.pair_of()
        # Prefill took this router for lost, and its own word of it is still on its way.
        decode.engine.fail(start_decode, Aborted("prefill gave the request up"))
        await prefill.engine.next(Cancel)
        prefill, start_prefill, decode, start_decode = await setup.pair_of(attempt=1)
        prefill.engine.say(start_prefill, 0, [10])
        decode.engine.say(start_decode, 0, [10, 11], "stop")
        assert await reader.result() == ([10, 11], "stop")


async def test_decode_loss_mid_stream_neither_loses_nor_repeats_tokens():
    async with cluster(num_decodes=2) as setup, reading(setup) as reader:
        prefill, start_prefill, decode, start_decode = await setup.pair_of()
        prefill.engine.say(start_prefill, 0, [10])
        decode.engine.say(start_decode, 0, [10, 11, 12])
        await until_async(lambda: reader.token_ids == [10, 11, 12])
        decode.engine.close()
        prefill, start_prefill, second, start_decode = await setup.pair_of(attempt=1)
        assert second == setup.others(decode)
        assert start_decode.request.prompt_ids == [1, 2, 3, 10, 11, 12]
        assert start_decode.request.num_prior_tokens == 3
        prefill.engine.say(start_prefill, 3, [13])
        second.engine.say(start_decode, 3, [13, 14], "length")
        assert await reader.result() == ([10, 11, 12, 13, 14], "length")


def wanting_prompt(start=0):
    return request(logprobs=LogprobOptions(num_top=1, prompt_start=start))


async def test_decode_tokens_wait_for_prompt_logprobs_of_prefill():
    async with cluster() as setup, reading(setup, wanting_prompt()) as reader:
        prefill, start_prefill, decode, start_decode = await setup.pair_of()
        prefill.engine.say(start_prefill, 0, [], prompt_logprobs=logprobs(0, 1))
        await until_async(lambda: reader.prompt_logprobs)
        (work,) = decode_streams(setup)
        decode.engine.say(start_decode, 0, [10, 11], logprobs=logprobs(3, 5))
        await until_async(lambda: not work.is_empty)
        assert reader.token_ids == []
        rest = {"prompt_index": 1, "prompt_logprobs": logprobs(1, 3)}
        prefill.engine.say(start_prefill, 0, [10], "handed_off", logprobs=logprobs(3, 4), **rest)
        decode.engine.say(start_decode, 2, [12], "stop", logprobs=logprobs(5, 6))
        assert await reader.result() == ([10, 11, 12], "stop")
        assert reader.prompt_logprobs + reader.logprobs == logprobs(0, 6)


async def test_decode_failure_does_not_wait_for_prompt_logprobs():
    async with cluster(num_decodes=2) as setup, reading(setup, wanting_prompt()) as reader:
        prefill, start_prefill, decode, _ = await setup.pair_of()
        prefill.engine.say(start_prefill, 0, [], prompt_logprobs=logprobs(0, 1))
        await until_async(lambda: reader.prompt_logprobs)
        decode.engine.close()
        await prefill.engine.next(Cancel)
        prefill, start_prefill, decode, _ = await setup.pair_of(attempt=1)
        assert start_prefill.request == wanting_prompt(1)
        run = {"prompt_index": 1, "prompt_logprobs": logprobs(1, 3)}
        prefill.engine.say(start_prefill, 0, [9], "stop", logprobs=logprobs(3, 4), **run)
        assert await reader.result() == ([9], "stop")
        assert reader.prompt_logprobs + reader.logprobs == logprobs(0, 4)


async def test_prefill_without_prompt_logprobs_does_not_block_tokens():
    async with cluster() as setup, reading(setup, wanting_prompt()) as reader:
        prefill, start_prefill, decode, start_decode = await setup.pair_of()
        decode.engine.say(start_decode, 0, [10, 11], "stop")
        prefill.engine.say(start_prefill, 0, [10], "handed_off")
        assert await reader.result() == ([10, 11], "stop")


async def test_prefill_loss_after_the_hand_off_does_not_affect_the_request():
    async with cluster() as setup, reading(setup) as reader:
        prefill, _, decode, start_decode = await begun(setup, reader, "handed_off")
        prefill.engine.close()
        await until_async(lambda: not setup.backend.health().is_serving)
        decode.engine.say(start_decode, 0, [10, 11], "stop")
        assert await reader.result() == ([10, 11], "stop")


async def test_phases_reported_by_nodes_are_forwarded_even_if_prefill_is_late():
    async with cluster() as setup, reading(setup) as reader:
        prefill, start_prefill, decode, start_decode = await setup.pair_of()
        reserve, push = Phase("reserve", 0.0, 0.5), Phase("push", 0.5, 1.0)
        prefill.engine.say(start_prefill, 0, [10], phases=[reserve])
        await until_async(lambda: reader.token_ids == [10])
        decode.engine.say(start_decode, 0, [10, 11])
        await until_async(lambda: reader.token_ids == [10, 11])
        prefill.engine.say(start_prefill, 1, [], "handed_off", phases=[push])
        (client,) = [node.client for node in setup.backend._cluster.prefills]
        await until_async(lambda: not client.num_streams)
        decode.engine.say(start_decode, 2, [12], "stop", phases=[Phase("landed", 0.1, 0.2)])
        assert await reader.result() == ([10, 11, 12], "stop")
    assert [phase.name for phase in reader.phases] == ["queue", "pair", "reserve", "push", "landed"]
    sent_s = reader.phases[1].start_s + reader.phases[1].duration_s
    nodes = ["", decode.url, prefill.url, prefill.url, decode.url]
    assert [phase.node for phase in reader.phases] == nodes
    assert [phase.start_s - sent_s for phase in reader.phases[2:]] == pytest.approx([0.0, 0.5, 0.1])


async def test_failed_attempt_is_reported_as_one_phase():
    async with cluster(num_prefills=2) as setup, reading(setup) as reader:
        prefill, start_prefill, decode, _ = await setup.pair_of()
        prefill.engine.fail(start_prefill, EngineFailed("bad luck"))
        await decode.engine.next(Cancel)
        second, start_prefill, _, _ = await setup.pair_of(attempt=1)
        second.engine.say(start_prefill, 0, [10], "stop", phases=[Phase("reserve", 0.0, 0.5)])
        assert await reader.result() == ([10], "stop")
    told = [(phase.name, phase.node) for phase in reader.phases]
    assert [name for name, _ in told] == ["queue", "pair", "lost_attempt", "pair", "reserve"]
    assert told[-1] == ("reserve", second.url)


async def test_prefill_failure_after_the_first_decode_token_is_ignored():
    async with cluster() as setup, reading(setup) as reader:
        prefill, start_prefill, decode, start_decode = await setup.pair_of()
        decode.engine.say(start_decode, 0, [10, 11])
        await until_async(lambda: reader.token_ids == [10, 11])
        prefill.engine.fail(start_prefill, EngineFailed("too late to matter"))
        (client,) = [node.client for node in setup.backend._cluster.prefills]
        await until_async(lambda: not client.num_streams)
        decode.engine.say(start_decode, 2, [12], "stop")
        assert await reader.result() == ([10, 11, 12], "stop")


async def test_error_that_is_not_retryable_is_raised_immediately():
    async with cluster() as setup:
        with pytest.raises(ExceptionGroup) as raised:
            async with reading(setup):
                prefill, start_prefill, decode, _ = await setup.pair_of()
                prefill.engine.fail(start_prefill, InvalidRequest("too long"))
                await decode.engine.next(Cancel)
        assert raised.group_contains(InvalidRequest, match="too long")


async def test_client_gets_429_after_two_full_nodes():
    async with cluster(num_decodes=2, max_attempts=5) as setup:
        with pytest.raises(ExceptionGroup) as raised:
            async with reading(setup):
                prefill, _, first, start_decode = await setup.pair_of()
                first.engine.fail(start_decode, Overloaded("full"))
                await prefill.engine.next(Cancel)
                _, _, second, start_decode = await setup.pair_of(attempt=1)
                assert second == setup.others(first)
                second.engine.fail(start_decode, Overloaded("full, too"))
        assert raised.group_contains(Overloaded, match="full, too")


@pytest.mark.parametrize(
    ("max_attempts", "kind", "sentence"),
    [
        (1, EngineFailed, "^failure 0$"),
        (2, AttemptsUsedUp, r"after 2 attempts; the last error was: failure 1$"),
    ],
)
async def test_attempts_are_bounded_and_end_in_one_typed_error(max_attempts, kind, sentence):
    async with cluster(max_attempts=max_attempts) as setup:
        with pytest.raises(ExceptionGroup) as raised:
            async with reading(setup):
                for attempt in range(max_attempts):
                    prefill, start_prefill, decode, _ = await setup.pair_of(attempt)
                    prefill.engine.fail(start_prefill, EngineFailed(f"failure {attempt}"))
                    await decode.engine.next(Cancel)
        assert raised.group_contains(kind, match=sentence)


async def test_failed_request_reports_its_phases():
    async with cluster(max_attempts=2) as setup:
        with pytest.raises(ExceptionGroup):
            async with reading(setup) as reader:
                for attempt in range(2):
                    prefill, start_prefill, decode, _ = await setup.pair_of(attempt)
                    prefill.engine.fail(start_prefill, EngineFailed("out of order"))
                    await decode.engine.next(Cancel)
        names = [phase.name for phase in reader.phases]
        assert names == ["queue", "pair", "lost_attempt", "pair"]
        assert reader.phases[-1].node == setup.decodes[0].url


async def test_error_without_a_pair_includes_the_last_failure():
    async with cluster(node_wait_s=0.05) as setup:
        with pytest.raises(ExceptionGroup) as raised:
            async with reading(setup):
                _, _, decode, _ = await setup.pair_of()
                decode.engine.close()
        assert raised.group_contains(NoNodeAvailable, match=r"connection broke; no pair of nodes")


async def test_client_deadline_ends_the_wait_for_a_node():
    async with cluster(node_wait_s=PATIENCE_S) as setup:
        setup.decodes[0].engine.close()
        await until_async(lambda: not setup.backend.health().is_serving)
        with pytest.raises(DeadlinePassed, match=r"deadline passed: .*decode"):
            await read(setup.backend, request(deadline_s=0.2))


async def test_client_deadline_ends_the_wait_for_a_node_after_a_failed_attempt():
    async with cluster(node_wait_s=PATIENCE_S) as setup:
        with pytest.raises(ExceptionGroup) as raised:
            async with reading(setup, request(deadline_s=1.0)):
                _, _, decode, _ = await setup.pair_of()
                decode.engine.close()
        assert raised.group_contains(DeadlinePassed)


async def test_node_wait_before_the_client_deadline_ends_with_no_node():
    async with cluster(node_wait_s=0.05) as setup:
        setup.decodes[0].engine.close()
        await until_async(lambda: not setup.backend.health().is_serving)
        with pytest.raises(NoNodeAvailable):
            await read(setup.backend, request(deadline_s=PATIENCE_S))


async def test_stream_continues_after_the_only_decode_node_restarts():
    async with cluster(node_wait_s=60) as setup, reading(setup) as reader:
        prefill, start_prefill, decode, start_decode = await setup.pair_of()
        prefill.engine.say(start_prefill, 0, [10], "handed_off")
        decode.engine.say(start_decode, 0, [10, 11])
        await until_async(lambda: reader.token_ids == [10, 11])
        decode.restart_engine()
        prefill, start_prefill, decode, start_decode = await setup.pair_of(attempt=1)
        assert start_decode.request.prompt_ids == [1, 2, 3, 10, 11]
        decode.engine.say(start_decode, 2, [12], "stop")
        assert await reader.result() == ([10, 11, 12], "stop")


async def test_new_request_waits_for_a_node_if_the_cluster_has_served(monkeypatch):
    monkeypatch.setattr(watch, "FIRST_ANSWER_TIMEOUT_S", 0.1)
    async with cluster(node_wait_s=60) as setup:
        setup.decodes[0].engine.close()  # before anybody asked what is served
        await until_async(lambda: not setup.backend.health().is_serving)
        assert setup.backend.models().choose(None).name == "m"
        async with reading(setup) as reader:
            setup.decodes[0].restart_engine()
            prefill, start_prefill, *_ = await setup.pair_of()
            prefill.engine.say(start_prefill, 0, [2], "stop")
            assert await reader.result() == ([2], "stop")


async def test_request_is_aborted_while_it_waits_for_a_node():
    async with cluster(node_wait_s=60) as setup, reading(setup) as reader:
        _, _, decode, _ = await begun(setup, reader)
        decode.engine.close()
        waits = setup.backend._node_wait
        await until_async(lambda: len(waits) == 1)
        assert await setup.backend.abort("r1")
        assert await reader.result() == ([10], "abort")
        assert len(waits) == 0


async def test_abort_during_an_attempt_failure_is_not_lost():
    async with cluster(num_prefills=2, num_decodes=2) as setup, reading(setup) as reader:
        await begun(setup, reader)
        for node in setup.backend._cluster.prefills:
            for stream in list(node.client._streams.values()):
                stream.fail(PeerLost("cut off"))
        assert await setup.backend.abort("r1")
        assert await reader.result() == ([10], "abort")


async def silence(setup) -> None:
    """Have no engine be asked any more, and hear what each said as long as it was."""
    nodes = setup.backend._cluster.prefills + setup.backend._cluster.decodes
    await setup.backend.flush_cache()
    for node in nodes:
        node.client._send = lambda message: None
    last_words = NodeLoad(num_running=9)
    for fake in setup.prefills + setup.decodes:
        await fake.engine.next(FlushCache)
        fake.engine.send(Pong(epoch=fake.engine.epoch, load=last_words))
    await until_async(lambda: all(node.client.load == last_words for node in nodes))


async def test_request_is_aborted_while_its_next_pair_is_being_probed():
    # So rare that a silent node is not known to live before the test says so.
    fields = {"num_prefills": 2, "num_decodes": 2, "heartbeat_interval_ms": 60_000}
    async with cluster(**fields) as setup, reading(setup) as reader:
        await begun(setup, reader)
        await silence(setup)
        nodes = setup.backend._cluster.prefills + setup.backend._cluster.decodes
        for node in nodes:
            node.client._received_at_s = -math.inf
        for stream in decode_streams(setup):
            stream.fail(EngineFailed("broke"))
        await until_async(lambda: not any(number for number, _ in in_flight(setup)))
        assert await setup.backend.abort("r1")
        for node in nodes:
            node.client._received_at_s = math.inf
        assert await reader.result() == ([10], "abort")
        assert not await setup.backend.abort("r1")


async def test_draining_node_is_avoided_immediately_and_its_peer_is_not():
    async with cluster(num_decodes=2, max_attempts=1) as setup, reading(setup) as reader:
        prefill, start_prefill, decode, start_decode = await begun(setup, reader)
        decode.now_says(is_draining=True)
        decode.engine.fail(start_decode, NodeDraining("handed over"))
        await prefill.engine.next(Cancel)
        prefill, start_prefill, second, _ = await setup.pair_of(attempt=1)
        assert second == setup.others(decode)
        reasons = {n.url: n.reason for n in setup.backend._cluster.decodes if not n.is_up}
        assert reasons == {decode.url: "is draining"}
        prefill.engine.fail(start_prefill, PeerDraining("the other half's"))
        await second.engine.next(Cancel)
        assert all(node.is_up for node in setup.backend._cluster.prefills)
        prefill, start_prefill, _, _ = await setup.pair_of(attempt=2)
        prefill.engine.say(start_prefill, 1, [2], "stop")
        assert await reader.result() == ([10, 2], "stop")


async def test_client_disconnect_cancels_both_halves():
    async with cluster() as setup:
        async with reading(setup) as reader:
            prefill, start_prefill, decode, _ = await setup.pair_of()
            prefill.engine.say(start_prefill, 0, [10])
            await until_async(lambda: reader.token_ids == [10])
            reader.task.cancel()
        await prefill.engine.next(Cancel)
        await decode.engine.next(Cancel)
        assert in_flight(setup) == [(0, 0), (0, 0)]
        assert 'requests_total{model_name="",outcome="cancelled"} 1.0' in setup.backend.metrics()


async def test_processed_tokens_are_reported_per_connected_engine():
    async with cluster(num_prefills=2) as setup:
        first, second = setup.prefills
        nodes = {node.url: node for node in setup.backend._cluster.prefills}
        load = NodeLoad(prompt_tokens=40, generated_tokens=2)
        for fake in (first, second):
            fake.engine.load = load
        await until_async(lambda: all(node.client.load == load for node in nodes.values()))
        before = nodes[first.url].client
        told = setup.backend.token_counts()
        assert (told[before], told[nodes[second.url].client]) == (42, 42)
        before.stop()
        told = setup.backend.token_counts()
        assert before not in told
        assert told[nodes[second.url].client] == 42


async def test_aborted_request_finishes_with_reason_abort():
    async with cluster() as setup, reading(setup) as reader:
        prefill, start_prefill, decode, start_decode = await setup.pair_of()
        prefill.engine.say(start_prefill, 0, [10])
        decode.engine.say(start_decode, 0, [10, 11])
        await until_async(lambda: reader.token_ids == [10, 11])
        assert await setup.backend.abort("r1")
        assert await reader.result() == ([10, 11], "abort")
        await decode.engine.next(Cancel)
        assert not await setup.backend.abort("r1")


class Stalled(Receiver):
    """The receiver of a client that stops reading after the first delta, until `is_reading` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.deltas, self.is_reading = [], asyncio.Event()

    def take(self, delta) -> None:
        self.deltas.append(delta)
        super().take(delta)
        self.has_room = False

    async def drain(self) -> None:
        await self.is_reading.wait()
        self.has_room = True


async def test_abort_of_a_stalled_stream_cancels_both_halves_at_once():
    async with cluster() as setup, asyncio.TaskGroup() as tasks:
        receiver = Stalled()
        tasks.create_task(setup.backend.generate(request(), receiver))
        prefill, start_prefill, decode, _ = await setup.pair_of()
        prefill.engine.say(start_prefill, 0, [10])
        await until_async(lambda: receiver.deltas)
        assert await setup.backend.abort("r1")
        await prefill.engine.next(Cancel)
        await decode.engine.next(Cancel)
        receiver.is_reading.set()
        await until_async(lambda: receiver.is_ended)
        assert receiver.deltas[-1].finish.reason == "abort"


async def test_request_is_aborted_between_hand_off_and_first_decode_token():
    async with cluster() as setup, reading(setup) as reader:
        _, _, decode, _ = await begun(setup, reader, "handed_off")
        assert await setup.backend.abort("r1")
        assert await reader.result() == ([10], "abort")
        await decode.engine.next(Cancel)


def grouped(index: int):
    return request(request_id=f"r{index}", group="g")


async def test_requests_of_one_group_go_to_one_pair():
    async with cluster(num_prefills=2, num_decodes=2) as setup, asyncio.TaskGroup() as tasks:
        readers = [Reader(tasks, setup.backend, grouped(index)) for index in range(3)]
        prefill, start, _, _ = await setup.pair_of()
        starts = [start, *[await prefill.engine.next(StartPrefill) for _ in range(2)]]
        for start in starts:
            prefill.engine.say(start, 0, [2], "stop")
        assert [await reader.result() for reader in readers] == [([2], "stop")] * 3
        assert setup.others(prefill).engine.is_idle()
        assert setup.backend.leftovers["groups"] == 0


async def test_group_moves_to_one_new_pair_when_its_pair_fails():
    async with cluster(num_prefills=3) as setup, asyncio.TaskGroup() as tasks:
        readers = [Reader(tasks, setup.backend, grouped(index)) for index in range(2)]
        prefill, first, decode, _ = await setup.pair_of()
        await decode.engine.next(StartDecode)
        for start in (first, await prefill.engine.next(StartPrefill)):
            prefill.engine.fail(start, EngineFailed("bad luck"))
        others = [node for node in setup.prefills if node != prefill]
        await until_async(lambda: any(not node.engine.is_idle() for node in others))
        (second,) = [node for node in others if not node.engine.is_idle()]
        for _ in readers:
            second.engine.say(await second.engine.next(StartPrefill), 0, [2], "stop")
        assert [await reader.result() for reader in readers] == [([2], "stop")] * 2


async def test_group_does_not_use_a_lost_pair():
    async with cluster(num_prefills=2) as setup, asyncio.TaskGroup() as tasks:
        first = Reader(tasks, setup.backend, grouped(0))
        prefill, start_prefill, decode, start_decode = await setup.pair_of()
        prefill.engine.say(start_prefill, 0, [10], "handed_off")
        await until_async(lambda: first.token_ids == [10])
        prefill.engine.close()
        await until_async(lambda: not all(node.is_up for node in setup.backend._cluster.prefills))
        second = Reader(tasks, setup.backend, grouped(1))
        other = setup.others(prefill)
        other.engine.say(await other.engine.next(StartPrefill), 0, [2], "stop")
        assert await second.result() == ([2], "stop")
        decode.engine.say(start_decode, 0, [10, 11], "stop")
        assert await first.result() == ([10, 11], "stop")


async def test_without_a_node_health_names_the_missing_role():
    prefill = FakeNode("prefill")
    async with prefill.serving():
        nobody = FakeNode("decode")
        async with nobody.serving():
            pass
        async with watched([prefill], [nobody]) as backend:
            await until_async(lambda: "refused" in backend.health().detail)
            health = backend.health()
            assert not health.is_serving
            assert f"no decode node reachable: {nobody.url} Connection refused" in health.detail
            with pytest.raises(NoNodeAvailable, match="refused"):
                await read(backend)
            with pytest.raises(NoNodeAvailable):
                backend.models().choose(None)


async def test_health_names_both_fingerprints_of_nodes_with_different_models():
    decodes = [FakeNode("decode", fingerprint="model-b")]
    async with cluster(decodes=decodes) as setup:
        health = setup.backend.health()
        assert not health.is_serving
        assert "model-a" in health.detail
        assert "model-b" in health.detail


async def test_served_model_comes_from_the_nodes():
    prefills = [FakeNode("prefill", max_prompt_tokens=60)]
    async with cluster(prefills=prefills) as setup:
        model = setup.backend.models().choose(None)
        assert (model.name, model.context_length, model.max_prompt_tokens) == ("m", 100, 60)
        assert model.tokenizer is None


async def test_server_info_shows_every_node_with_its_load():
    async with cluster() as setup:
        info = setup.backend.server_info()
        assert [node["role"] for node in info["nodes"]] == ["prefill", "decode"]
        assert [node["prefixes"]["num_blocks"] for node in info["nodes"]] == [0, 0]
        assert json.dumps(info)
        assert info["is_serving"]
        shown = [node["load"]["num_pages"] for node in info["nodes"]]
        assert [load.num_pages for load in setup.backend.loads()] == shown


async def test_node_gets_the_remaining_deadline_and_not_the_client():
    async with cluster() as setup, asyncio.TaskGroup() as tasks:
        asked = request(client="0a1b2c3d", deadline_s=600.0)
        reader = Reader(tasks, setup.backend, asked)
        _, start, decode, decode_start = await setup.pair_of()
        for half in (start, decode_start):
            assert half.request.client == ""
            assert 0 < half.request.deadline_s <= 600.0
        decode.engine.say(decode_start, 0, [7])
        decode.engine.fail(decode_start, KVCorrupted("broke"))
        # A client that has heard something waits on: another attempt has no deadline.
        _, again, decode, decode_again = await setup.pair_of(attempt=1)
        assert again.request.deadline_s is None
        decode.engine.say(decode_again, 1, [8], "stop")
        await reader.task


async def test_requests_go_to_nodes_that_report_their_prefix_until_a_restart():
    prompt = list(range(300))
    async with (
        cluster(3, 3, policy="cache_aware") as setup,
        asyncio.TaskGroup() as tasks,
    ):
        warm = [setup.prefills[2], setup.decodes[1]]
        for node in warm:
            node.engine.tell_cached(block_names(prompt))
        known = [setup.backend._cluster.node(node.url).prefixes.cached for node in warm]
        await until_async(lambda: [prefixes.num_blocks for prefixes in known] == [2, 2])
        for number in range(3):
            asked = request(prompt, f"r{number}", session="of the router's own")
            reader = Reader(tasks, setup.backend, asked)
            prefill, start, decode, _ = await setup.pair_of()
            assert [prefill, decode] == warm
            assert start.request.session == ""
            reader.task.cancel()
            await until_async(lambda: not setup.backend._cluster.num_streams)
            for node in warm:
                await node.engine.next(Cancel)
        warm[0].restart_engine()
        await until_async(lambda: known[0].num_blocks == 0)


async def started(engine, kind):
    """Return the next start of a request, without the cancels before it."""
    async with asyncio.timeout(PATIENCE_S):
        while not isinstance(message := await engine._received.get(), kind):
            pass
    return message


async def next_attempt(setup):
    """Return the start at the only prefill node, the decode node of the attempt, and the start there."""
    start_prefill = await started(setup.prefills[0].engine, StartPrefill)
    decode = await busy_of(setup.decodes)
    return start_prefill, decode, await started(decode.engine, StartDecode)


async def busy_of(nodes):
    """Return the node that has received something."""
    await until_async(lambda: not all(node.engine.is_idle() for node in nodes))
    (busy,) = [node for node in nodes if not node.engine.is_idle()]
    return busy


async def lose_decode(setup):
    """Have the decode node of the next attempt be lost before it sends a token."""
    _, decode, _ = await next_attempt(setup)
    decode.engine.close()


def ended_engine(raised) -> bool:
    return raised.group_contains(RequestEndedEngine, match="nodes were lost, one after the other")


async def test_prompt_that_was_on_two_lost_nodes_is_tried_on_no_third_pair():
    async with cluster(num_decodes=3, max_attempts=5) as setup:
        told = []
        setup.backend.suspects.on_refused = told.append
        with pytest.raises(ExceptionGroup) as raised:
            async with reading(setup):
                for _ in range(2):
                    await lose_decode(setup)
        assert ended_engine(raised)
        # The client repeats it, with another id and seed.
        with pytest.raises(RequestEndedEngine):
            await read(setup.backend, request(request_id="r2"))
        assert told == [name_of(request(), "m")]
        assert sum(use.num_started for use in setup.backend.pairing.uses.values()) == 2
        async with reading(setup, request(prompt_ids=(1, 2))) as other:
            start_prefill, decode, start_decode = await next_attempt(setup)
            setup.prefills[0].engine.say(start_prefill, 0, [10], "handed_off")
            decode.engine.say(start_decode, 0, [10, 11], "stop")
            assert await other.result() == ([10, 11], "stop")


async def test_prompt_of_two_lost_prefill_nodes_is_refused_if_decode_reports_the_loss_first(
    monkeypatch,
):
    monkeypatch.setattr("tandem.router.serving.request.LOSS_NOTICED_S", PATIENCE_S)
    async with cluster(num_prefills=3, max_attempts=5) as setup:
        with pytest.raises(ExceptionGroup) as raised:
            async with reading(setup):
                for _ in range(2):
                    start_decode = await started(setup.decodes[0].engine, StartDecode)
                    prefill = await busy_of(setup.prefills)
                    setup.decodes[0].engine.fail(start_decode, PeerLost("prefill was lost"))
                    await started(prefill.engine, Cancel)
                    prefill.engine.close()
        assert ended_engine(raised)


async def test_loss_that_only_a_node_reports_refuses_no_prompt():
    """As where a firewall keeps decode from prefill."""
    async with cluster(max_attempts=3) as setup:
        with pytest.raises(ExceptionGroup) as raised:
            async with reading(setup):
                for _ in range(3):
                    _, decode, start_decode = await next_attempt(setup)
                    decode.engine.fail(start_decode, PeerLost("prefill cannot be reached"))
        assert raised.group_contains(AttemptsUsedUp)
        assert setup.backend.suspects.known(request(), "m") == ("", 0)


@pytest.mark.parametrize("max_attempts", [1, 2])
async def test_lost_nodes_count_over_all_requests_with_the_same_prompt(max_attempts):
    async with cluster(num_decodes=3, max_attempts=max_attempts) as setup:
        if max_attempts == 1:
            with pytest.raises(ExceptionGroup) as raised:
                async with reading(setup):
                    await lose_decode(setup)
            assert raised.group_contains(PeerLost)
        with pytest.raises(ExceptionGroup) as raised:
            async with reading(setup, request(request_id="again")):
                for _ in range(max_attempts):
                    await lose_decode(setup)
        assert ended_engine(raised)


async def test_refused_prompt_is_computed_again_after_a_while():
    async with cluster(num_decodes=1) as setup:
        known, now_s = setup.backend.suspects, asyncio.get_running_loop().time()
        known.refuse(name_of(request(), "m"))
        with pytest.raises(RequestEndedEngine):
            await read(setup.backend)
        known._records[name_of(request(), "m")].noted_s = now_s - KEPT_S - 1
        async with reading(setup) as reader:
            await serve(setup, reader)


async def outcome(backend, generate_request):
    """Return the tokens of a request, or the kind of its error."""
    try:
        parts = await read(backend, generate_request)
    except TandemError as error:
        return type(error)
    return [token_id for part in parts for token_id in part.token_ids]


async def test_prompts_of_a_lost_node_are_tried_one_at_a_time_and_only_the_cause_is_refused(
    monkeypatch,
):
    monkeypatch.setattr(suspects, "ALONE_S", PATIENCE_S)
    async with (
        cluster(num_decodes=2, node_wait_s=PATIENCE_S) as setup,
        asyncio.TaskGroup() as tasks,
    ):
        (prefill,), backend = setup.prefills, setup.backend
        requests = [request((1, 2, n), request_id=str(n), group="g") for n in range(3)]
        clients = [tasks.create_task(outcome(backend, each)) for each in requests]
        for _ in requests:
            _, lost, _ = await next_attempt(setup)
        lost.restart_engine()
        for _ in requests:
            start_prefill, decode, start_decode = await next_attempt(setup)
            assert len(decode_streams(setup)) == 1
            if start_decode.request.request_id == "1":
                decode.restart_engine()
            else:
                prefill.engine.say(start_prefill, 0, [10], "handed_off")
                decode.engine.say(start_decode, 0, [10, 11], "stop")
    assert [client.result() for client in clients] == [[10, 11], RequestEndedEngine, [10, 11]]


async def test_prompts_that_waited_long_are_tried_together_and_refused_after_the_third_loss(
    monkeypatch,
):
    monkeypatch.setattr(suspects, "ALONE_S", 0)
    async with (
        cluster(num_decodes=3, node_wait_s=PATIENCE_S) as setup,
        asyncio.TaskGroup() as tasks,
    ):
        (prefill,), backend = setup.prefills, setup.backend
        clients = [
            tasks.create_task(outcome(backend, request((1, n), request_id=str(n), group="g")))
            for n in range(2)
        ]
        for _ in range(2):
            for _ in clients:
                _, lost, _ = await next_attempt(setup)
            assert len(decode_streams(setup)) == 2
            lost.restart_engine()
        for _ in clients:
            start_prefill, decode, start_decode = await next_attempt(setup)
            if start_decode.request.request_id == "0":
                prefill.engine.say(start_prefill, 0, [10], "handed_off")
                decode.engine.say(start_decode, 0, [10, 11], "stop")
        await until_async(clients[0].done)
        decode.restart_engine()
    assert [client.result() for client in clients] == [[10, 11], RequestEndedEngine]


async def test_choices_of_one_request_count_a_lost_node_once():
    async with cluster(num_decodes=2) as setup, asyncio.TaskGroup() as tasks:
        choices = [request(request_id=str(n), group="g") for n in range(3)]
        clients = [tasks.create_task(outcome(setup.backend, each)) for each in choices]
        for _ in choices:
            _, lost, _ = await next_attempt(setup)
        lost.engine.close()
        for _ in choices:
            start_prefill, decode, start_decode = await next_attempt(setup)
            setup.prefills[0].engine.say(start_prefill, 0, [10], "handed_off")
            decode.engine.say(start_decode, 0, [10, 11], "stop")
        results = await asyncio.gather(*clients)
    assert results == [[10, 11]] * 3


async def test_equal_prompts_that_are_lost_at_once_count_one_loss():
    known, asked = suspects.Suspects(), request()
    for _ in range(3):
        known.note_loss(name_of(asked, "m"), 1)
    assert known.known(asked, "m") == (name_of(asked, "m"), 1)
    known.note_loss(name_of(asked, "m"), 2)
    with pytest.raises(RequestEndedEngine):
        known.note_loss(name_of(asked, "m"), 3)


async def test_first_token_clears_a_suspected_prompt():
    async with cluster(num_decodes=3) as setup, reading(setup) as reader:
        await lose_decode(setup)
        start_prefill, decode, start_decode = await next_attempt(setup)
        setup.prefills[0].engine.say(start_prefill, 0, [10], "handed_off")
        decode.engine.say(start_decode, 0, [10, 11])
        await until_async(lambda: reader.token_ids == [10, 11])
        assert setup.backend.leftovers["suspects"] == 0
        decode.engine.close()
        _, decode, start_decode = await next_attempt(setup)
        decode.engine.say(start_decode, 2, [12], "stop")
        assert await reader.result() == ([10, 11, 12], "stop")
