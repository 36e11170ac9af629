"""KV events of our own prefix cache, as a subscriber receives them."""

import asyncio
import random
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest
import zmq

from tandem.cli.up import free_ports
from tandem.engine.pages.kv_cache import KVCache
from tandem.stock.kv_events import KvEventSubscriber
from tandem.wire.errors import ConfigInvalid
from tandem.wire.events import publisher as publishing
from tandem.wire.events.publisher import KvEventPublisher, KvEventsConfig
from tandem.wire.prefixes import BLOCK_TOKENS, block_names
from tests.patience import until_async

PROMPT = list(range(40 * BLOCK_TOKENS))


class PublishingCache:
    """A prefix cache and its publisher, which restart together."""

    def __init__(self, page_size=16, num_pages=400):
        self.page_size, self.num_pages = page_size, num_pages
        events, replay = free_ports(2)
        self.config = KvEventsConfig(
            endpoint=f"tcp://*:{events}", replay_endpoint=f"tcp://*:{replay}", topic="kv@a@m"
        )
        self.endpoints = [f"tcp://127.0.0.1:{port}" for port in (events, replay)]
        self.start()

    def start(self):
        self.cache = KVCache(self.num_pages, self.page_size)
        self.publisher = KvEventPublisher(self.config)
        self.cache.listen(self.publisher)

    def put(self, token_ids, salt=""):
        matched = self.cache.match(token_ids, salt)
        num_pages = len(token_ids) // self.page_size - len(matched.page_ids)
        pages = [*matched.page_ids, *(self.cache.allocate(num_pages) or [])]
        self.cache.insert(token_ids[: len(pages) * self.page_size], pages, salt)
        self.cache.release(pages)

    def step(self, rng):
        if rng.random() < 0.03:
            self.cache.flush()
        token_ids = PROMPT[: rng.randrange(20 * BLOCK_TOKENS)]
        token_ids += [rng.randrange(3)] * rng.randrange(20 * BLOCK_TOKENS)
        self.put(token_ids, rng.choice(["", "", "tenant"]))

    @property
    def names(self):
        return names_in(self.cache.journal)


def names_in(journal):
    changes = journal.since(0)
    return set() if changes is None else set(changes.added)


class LossySubscriber(KvEventSubscriber):
    """Loses half of the published batches."""

    rng = random.Random(3)

    async def _take(self, frames):
        if self.rng.random() < 0.5:
            await super()._take(frames)


@asynccontextmanager
async def subscribed(node, kind=KvEventSubscriber):
    subscriber = kind(*node.endpoints, topic="kv@", idle_s=0.05)
    task = asyncio.create_task(subscriber.run())
    try:
        yield lambda: names_in(subscriber.follower.journal)
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    assert subscriber.follower.num_malformed == 0


@pytest.mark.parametrize("page_size", [16, 96, 256])
async def test_subscribers_end_with_the_names_of_the_journal(page_size):
    node, rng = PublishingCache(page_size), random.Random(page_size)
    try:
        async with subscribed(node, LossySubscriber) as lossy:
            for _ in range(2):
                async with subscribed(node) as names:
                    for _ in range(100):
                        node.step(rng)
                        await asyncio.sleep(0)
                    await until_async(lambda: names() == node.names != set())
            await until_async(lambda: lossy() == node.names)
            node.publisher.close()
            node.start()  # a new life of the node
            node.put(PROMPT[: 6 * BLOCK_TOKENS])
            await until_async(lambda: lossy() == node.names == set(block_names(PROMPT[:768])))
    finally:
        node.publisher.close()


async def test_late_subscriber_of_a_node_that_kept_little_holds_no_wrong_name(monkeypatch):
    monkeypatch.setattr(publishing, "MAX_KEPT_BYTES", 20_000)
    node, rng = PublishingCache(), random.Random(5)
    try:
        with zmq.Context() as context, context.socket(zmq.SUB) as idle:
            idle.subscribe(b"")
            idle.connect(node.endpoints[0])  # never reads
            for _ in range(300):
                node.step(rng)
            async with subscribed(node) as names:
                tokens = iter(range(100, 10_000))

                def sees_a_new_prompt():
                    node.put([next(tokens)] * BLOCK_TOKENS)
                    return names() & node.names

                await until_async(sees_a_new_prompt)
                await until_async(lambda: names() <= node.names)
                assert names() < node.names
    finally:
        node.publisher.close()


async def test_node_does_not_wait_for_its_publisher(monkeypatch):
    monkeypatch.setattr(publishing, "INTERVAL_S", 0.3)
    monkeypatch.setattr(publishing, "MAX_QUEUED", 10)
    node = PublishingCache()
    try:
        async with subscribed(node) as names:
            for token in range(3):
                node.put([token] * 8 * BLOCK_TOKENS)
            node.put([7] * BLOCK_TOKENS)
            await until_async(lambda: set(block_names([7] * BLOCK_TOKENS)) <= names())
            assert names() < node.names
            node.cache.flush()
            await until_async(lambda: not names())
    finally:
        node.publisher.close()


def test_bad_requests_for_replay_are_ignored():
    node = PublishingCache()
    node.put(PROMPT[:BLOCK_TOKENS])
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(node.endpoints[1])
        dealer.send_multipart([b"", b"first"])
        dealer.send_multipart([b"too", b"", b"many", b"frames"])
        replies = []
        while not replies:
            dealer.send_multipart([b"", bytes(8)])
            reply = dealer.recv_multipart()
            while reply[2] != publishing.END_NUMBER:
                replies.append(reply)
                reply = dealer.recv_multipart()
        assert reply == [b"", b"", publishing.END_NUMBER, b""]
        [(_, topic, number, payload)] = replies
        assert (topic, number) == (b"kv@a@m", bytes(8))
        _, events, rank = msgspec.msgpack.decode(payload)
        expected = {
            "type": "BlockStored",
            "block_hashes": block_names(PROMPT[:BLOCK_TOKENS]),
            "parent_block_hash": None,
            "token_ids": PROMPT[:BLOCK_TOKENS],
            "block_size": BLOCK_TOKENS,
            "lora_id": None,
            "medium": "GPU",
            "lora_name": None,
        }
        assert (events, rank) == ([expected], 0)
    node.publisher.close()


def test_endpoint_in_use_is_refused():
    node = PublishingCache()
    with pytest.raises(
        ConfigInvalid, match=r"\d: Address already in use; set a different --kv-events"
    ):
        KvEventPublisher(node.config)
    node.publisher.close()
