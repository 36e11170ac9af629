"""The prefixes that a stock engine has cached, followed by its KV events."""

import asyncio
import random
from collections import Counter, deque
from contextlib import asynccontextmanager, suppress
from functools import cache

import msgspec
import pytest
import zmq
import zmq.asyncio

from tandem.stock.kv_events import END_NUMBER, CacheFollower, KvEventSubscriber, open_socket
from tandem.wire.prefixes import block_names, scope_name
from tests.patience import until_async

PROMPT = list(range(600))


def names(follower):
    changes = follower.journal.since(0)
    return set() if changes is None else set(changes.added)


class Engine:
    """An engine's prefix cache with copies of blocks, which publishes maps or arrays and keeps the latest batches."""

    def __init__(self, rng, size=16, kept=10_000, hashes=int, *, has_maps=True):
        self.rng, self.size, self.kept, self.to_hash, self.has_maps = (
            rng,
            size,
            kept,
            hashes,
            has_maps,
        )
        self.names_of = cache(block_names)
        self.restart()

    def restart(self):
        self.copies = Counter()
        self.life = self.rng.random()
        self.buffer, self.number = deque(maxlen=self.kept), 0

    def key(self, prefix):
        return self.to_hash(hash(prefix)) if prefix else None

    def event(self, kind, fields):
        if self.has_maps:
            return {"type": kind, **fields}
        values = [*fields.values()]
        while values and values[-1] is None:
            values.pop()
        return [kind, *values]

    def store(self, tokens, first=0):
        """Store the blocks of a prompt from block `first` on."""
        ends = range((first + 1) * self.size, len(tokens) + 1, self.size)
        prefixes = [tuple(tokens[:end]) for end in ends]
        if not prefixes:
            return []
        self.copies.update(prefixes)
        fields = {
            "block_hashes": [self.key(prefix) for prefix in prefixes],
            "parent_block_hash": self.key(prefixes[0][: -self.size]),
            "token_ids": list(prefixes[-1][first * self.size :]),
            "block_size": self.size,
            "lora_id": None,
            "medium": "GPU",
        }
        return [self.event("BlockStored", fields)]

    def compute(self, tokens):
        """Store the blocks of a prompt that are not cached; now and then, copies of some that are."""
        first = 0
        while first < len(tokens) // self.size and self.is_cached(tokens, first):
            first += 1
        if (
            self.rng.random() < 0.3
        ):  # behind the last cached block, even if one before it is missing
            after = [n for n in range(1, len(tokens) // self.size) if self.is_cached(tokens, n - 1)]
            return self.store(tokens, max(after, default=first))
        return self.store(tokens, max(0, first - self.rng.choice((0, 0, 1, 3))))

    def is_cached(self, tokens, number):
        return self.copies[tuple(tokens[: (number + 1) * self.size])] > 0

    def evict(self, num, *, last_first):
        """Remove copies of blocks, those at the end of prefixes first or in any order."""
        events = []
        for _ in range(num):
            blocks = [*self.copies.elements()]
            if not blocks:
                break
            rng = self.rng
            block = (
                max(rng.sample(blocks, min(8, len(blocks))), key=len)
                if last_first
                else rng.choice(blocks)
            )
            self.copies[block] -= 1
            fields = {"block_hashes": [self.key(block)], "medium": "GPU"}
            events.append(self.event("BlockRemoved", fields))
        return events

    def clear(self):
        self.copies.clear()
        return [self.event("AllBlocksCleared", {})]

    def publish(self, events):
        """Return the next batch."""
        payload = msgspec.msgpack.encode([self.life + self.number, events, 0])
        batch = self.number, payload
        self.buffer.append(batch)
        self.number += 1
        return batch

    def replay(self, first):
        return [(number, payload) for number, payload in self.buffer if number >= first]

    def step(self):
        """Do something at random, and return the batch."""
        rng, events = self.rng, []
        for _ in range(rng.randrange(1, 4)):
            match rng.randrange(20):
                case 0:
                    events += self.clear()
                case 1 | 2 | 3 | 4 | 5 | 6:
                    events += self.evict(rng.randrange(1, 12), last_first=rng.random() < 0.7)
                case _:
                    # Prompts share prefixes of any length.
                    tokens = PROMPT[: rng.randrange(300)]
                    tokens += [rng.randrange(2)] * rng.choice((0, 300))
                    events += self.compute(tokens)
        return self.publish(events)

    @property
    def held(self):
        """Names of the prefixes whose blocks are all cached."""
        cached = {block for block, count in self.copies.items() if count}
        held, found = {()}, set()
        for block in sorted(cached, key=len):
            if block[: -self.size] in held:
                held.add(block)
                found.update(self.names_of(block))
        return found


def catch_up(follower, engine, num_kept=10_000):
    """Replay as the subscriber does. The engine's socket drops replies but the first ones and the last."""
    for _ in range(30):
        batches = engine.replay(follower.replay_from)
        is_whole = len(batches) <= num_kept
        if not is_whole:
            del batches[num_kept - 1 : -1]
        if follower.take_replay(batches) and is_whole:
            return
    raise AssertionError("the follower does not catch up")


@pytest.mark.parametrize("seed", range(24))
def test_follower_holds_what_a_random_engine_holds(seed):
    rng = random.Random(seed)
    engine = Engine(
        rng,
        size=rng.choice([16, 48, 128, 240]),
        kept=rng.choice([4, 10_000]),
        hashes=rng.choice([int, lambda number: number.to_bytes(9, "big", signed=True)]),
        has_maps=rng.random() < 0.5,
    )
    follower, delayed = CacheFollower(), []
    num_held = 0
    for _ in range(120):
        batch = engine.step()
        event = rng.random()
        if event < 0.06:
            continue  # lost
        if event < 0.1:
            delayed.append(batch)
            continue
        if event < 0.14:
            engine.restart()
            delayed.clear()
            for _ in range(rng.choice((0, 2, follower.replay_from + 1))):
                engine.step()
            catch_up(follower, engine)  # as on every new connection
            continue
        if not follower.take(*batch):
            catch_up(follower, engine, rng.choice([3, 10_000]))
        assert names(follower) <= engine.held
        if delayed and rng.random() < 0.3:
            number, payload = delayed.pop()
            if not follower.take(number, payload):
                catch_up(follower, engine)
            assert names(follower) <= engine.held
        if engine.kept > 1000:
            assert names(follower) == engine.held
        num_held += bool(names(follower))
    assert num_held > 20
    follower.take(*engine.publish(engine.clear()))
    catch_up(follower, engine)
    follower.take(*engine.publish(engine.compute(PROMPT)))
    assert names(follower) == engine.held
    assert follower.num_malformed == 0


def test_lower_number_means_that_the_engine_restarted():
    engine, follower = Engine(random.Random(1)), CacheFollower()
    for _ in range(3):
        follower.take(*engine.publish(engine.store(PROMPT)))
    engine.restart()
    batch = engine.publish(engine.store([7] * 300))
    assert not follower.take(*batch)
    catch_up(follower, engine)
    assert names(follower) == engine.held


def batch_of(*events):
    return msgspec.msgpack.encode([1.5, [*events]])


def stored(**more):
    fields = {"block_hashes": [-7], "parent_block_hash": None, "token_ids": PROMPT[:128]}
    return {"type": "BlockStored", **fields, "block_size": 128, "lora_id": None, **more}


@pytest.mark.parametrize(
    ("more", "scope"),
    [
        ({}, ""),
        ({"medium": "GPU", "session_id": "a", "unheard_of": [1]}, ""),
        ({"cache_salt": "tenant"}, "tenant"),
        ({"lora_name": "sql", "lora_id": 3}, scope_name("", "sql")),
        ({"lora_name": "sql", "cache_salt": "tenant"}, scope_name("tenant", "sql")),
        ({"lora_name": "sql", "extra_keys": [["sql", "tenant"]]}, scope_name("tenant", "sql")),
        ({"lora_id": 3}, None),
        ({"medium": "CPU_PINNED"}, None),
        ({"locality": "REMOTE"}, None),
        ({"ownership": "disk"}, None),
        ({"extra_keys": [[["image", 3]]]}, None),
        ({"extra_keys": [[b"embeddings"]]}, None),
        ({"token_ids": [(token, token + 1) for token in PROMPT[:128]]}, None),
    ],
)
def test_block_is_named_if_its_inputs_are_known(more, scope):
    follower = CacheFollower()
    assert follower.take(0, batch_of(stored(**more)))
    assert names(follower) == (set() if scope is None else set(block_names(PROMPT[:128], scope)))
    assert follower.num_malformed == 0


def test_removals_from_tiers_and_unknown_events_change_nothing():
    follower = CacheFollower()
    removed = {"type": "BlockRemoved", "block_hashes": [-7], "medium": "CPU_PINNED"}
    assert follower.take(0, batch_of(stored(), removed, {"type": "Moved"}, ["Moved", 1]))
    assert names(follower) == set(block_names(PROMPT[:128]))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"ts": 1}),
        msgspec.msgpack.encode([1.5]),
        msgspec.msgpack.encode([1.5, 3]),
        msgspec.msgpack.encode([1.5, [None]]),
        msgspec.msgpack.encode([1.5, [], "rank"]),
        batch_of([]),
        batch_of({}),
        batch_of({"type": ["BlockStored"]}),
        batch_of({"type": "BlockStored"}),
        batch_of({"type": "BlockRemoved", "block_hashes": [[1]]}),
        batch_of(stored(token_ids=[*PROMPT[:127], "a"])),
        batch_of(stored(token_ids=[*PROMPT[:127], 2**63])),
        batch_of(stored(block_size="many")),
    ],
)
def test_malformed_batch_is_counted_and_empties_the_set(payload):
    follower = CacheFollower()
    follower.take(0, batch_of(stored()))
    assert follower.take(1, payload)
    assert (names(follower), follower.num_malformed) == (set(), 1)
    assert follower.take(2, batch_of(stored()))
    assert names(follower) == set(block_names(PROMPT[:128]))


class Publisher:
    """Publishes an engine's batches as vLLM does, or as older versions."""

    def __init__(self, engine, ports=("0", "0"), *, replies_with_topic=True):
        self.engine, self.replies_with_topic = engine, replies_with_topic
        self.context = zmq.asyncio.Context()
        self.pub, self.router = self.context.socket(zmq.PUB), self.context.socket(zmq.ROUTER)
        sockets = self.pub, self.router
        for sock, port in zip(sockets, ports, strict=True):
            sock.bind(f"tcp://127.0.0.1:{port}")
        self.endpoints = [sock.getsockopt_string(zmq.LAST_ENDPOINT) for sock in sockets]
        self.ports = [endpoint.rpartition(":")[2] for endpoint in self.endpoints]
        self.task = asyncio.create_task(self._replay())

    async def _replay(self):
        while True:
            peer, _, first = await self.router.recv_multipart()
            topic = [b""] if self.replies_with_topic else []
            for number, payload in self.engine.replay(int.from_bytes(first, "big")):
                reply = [peer, b"", *topic, number.to_bytes(8, "big"), payload]
                await self.router.send_multipart(reply)
            await self.router.send_multipart([peer, b"", *topic, END_NUMBER, b""])

    async def send(self, batch):
        await self.pub.send_multipart([b"", batch[0].to_bytes(8, "big"), batch[1]])

    async def close(self):
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task
        self.context.destroy(linger=0)  # waits until the ports are free


@asynccontextmanager
async def following(*args, **more):
    subscriber = KvEventSubscriber(*args, **more)
    task = asyncio.create_task(subscriber.run())
    try:
        yield subscriber.follower
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.mark.parametrize("replies_with_topic", [True, False])
async def test_subscriber_ends_with_the_true_set(replies_with_topic):
    engine = Engine(random.Random(4), size=32)
    publisher = Publisher(engine, replies_with_topic=replies_with_topic)
    engine.publish(engine.compute(PROMPT[:200]))

    def is_true():
        return names(follower) == engine.held != set()

    async with following(*publisher.endpoints, idle_s=0.05) as follower:
        await until_async(is_true)  # published before the subscriber came
        for number in range(40):
            batch = engine.step()
            if number % 3:
                await publisher.send(batch)
        await until_async(is_true)
        engine.publish(engine.clear() + engine.store([5] * 300))  # lost, without a later one
        await until_async(is_true)
        await publisher.pub.send_multipart([b"load", b"x", b"y"])
        for frames in ([b""], [b"", b"short", b""], [b"", END_NUMBER, b""]):
            await publisher.pub.send_multipart(frames)
        await until_async(lambda: follower.num_malformed == 3)
        assert is_true()
        await publisher.close()
        engine.restart()
        for _ in range(follower.replay_from + 1):
            engine.publish([])
        engine.publish(engine.compute([7] * 300))
        publisher = Publisher(engine, publisher.ports, replies_with_topic=replies_with_topic)
        await until_async(is_true)
        await publisher.close()


async def test_subscriber_starts_again_after_an_unexpected_error(monkeypatch):
    engine = Engine(random.Random(4), size=32)
    publisher = Publisher(engine)

    failures = []

    def fail(*batch):
        failures.append(batch)
        monkeypatch.undo()
        raise RuntimeError("unexpected")

    async with following(*publisher.endpoints, idle_s=0.05) as follower:

        async def is_true():
            await publisher.send(engine.publish(engine.store(PROMPT)))
            return names(follower) == engine.held != set()

        await until_async(is_true)
        monkeypatch.setattr(follower, "take", fail)
        await publisher.send(engine.publish(engine.store([7] * 300)))
        await until_async(lambda: failures)
        await until_async(is_true)
    assert len(failures) == 1
    await publisher.close()


async def test_subscriber_without_replay_starts_again_after_a_gap_or_a_restart():
    engine = Engine(random.Random(4), size=32)
    publisher = Publisher(engine)
    async with following(publisher.endpoints[0]) as follower:

        async def has_names():
            await publisher.send(engine.publish(engine.store(PROMPT)))
            return names(follower)

        await until_async(has_names)
        engine.publish(engine.evict(30, last_first=True))
        await publisher.send(engine.publish(engine.store([7] * 300)))
        await until_async(lambda: names(follower) == set(block_names([7] * 300)))
        await publisher.close()
        publisher = Publisher(engine, publisher.ports)
        await until_async(lambda: not names(follower))
    await publisher.close()


@pytest.mark.parametrize(
    ("kind", "engines"), [(zmq.SUB, zmq.XPUB), (zmq.DEALER, zmq.DEALER)], ids=["batches", "replay"]
)
async def test_engine_that_ends_while_messages_are_read_does_not_end_the_router(kind, engines):
    # After every 100 parts, libzmq learns of lost connections: here between the parts of a message.
    num_parts, num_messages = 7, 30
    with open_socket(kind) as sock:
        if kind == zmq.SUB:
            sock.setsockopt(zmq.SUBSCRIBE, b"")
        with zmq.asyncio.Context() as context, context.socket(engines) as engine:
            port = engine.bind_to_random_port("tcp://127.0.0.1")
            sock.connect(f"tcp://127.0.0.1:{port}")
            if engines == zmq.XPUB:
                await engine.recv()  # the subscription
            for _ in range(num_messages):
                await engine.send_multipart([b"part"] * num_parts)
            await sock.poll()
            with sock.get_monitor_socket(zmq.EVENT_CONNECT_RETRIED) as monitor:
                engine.close()
                await monitor.recv_multipart()
                sock.disable_monitor()
            reader = zmq.Socket.shadow(sock)  # asyncio's would learn of it before each message
            received = [reader.recv_multipart(zmq.NOBLOCK) for _ in range(num_messages)]
    assert received == [[b"part"] * num_parts] * num_messages
