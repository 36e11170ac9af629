"""KV events of an unmodified vLLM, and our own in vLLM's types."""

import asyncio
import json
import random
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest
import zmq

from tandem.cli.up import free_ports
from tandem.stock.kv_events import KvEventSubscriber
from tandem.wire.events.publisher import END_NUMBER, KvEventPublisher, KvEventsConfig
from tandem.wire.prefixes import BLOCK_TOKENS, block_names
from tests.patience import eventually, until_async
from tests.with_vllm.models import tiny
from tests.with_vllm.nodes import START_S, Cluster, get, post, start

SERVE = (
    *("--enforce-eager", "--skip-tokenizer-init", "--dtype", "float32", "--block-size", "32"),
    *("--enable-prompt-tokens-details", "--num-gpu-blocks-override", "80"),
)


def names(subscriber):
    changes = subscriber.follower.journal.since(0)
    return set() if changes is None else set(changes.added)


@asynccontextmanager
async def subscribed(*ports):
    subscriber = KvEventSubscriber(*(f"tcp://127.0.0.1:{port}" for port in ports))
    following = asyncio.create_task(subscriber.run())
    try:
        yield subscriber
    finally:
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
    assert subscriber.follower.num_malformed == 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_our_events_have_the_types_of_vllm():
    from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVEventBatch

    ports = free_ports(2)
    endpoints = [f"tcp://*:{port}" for port in ports]
    publisher = KvEventPublisher(
        KvEventsConfig(endpoint=endpoints[0], replay_endpoint=endpoints[1])
    )
    tokens = list(range(BLOCK_TOKENS))
    publisher.on_stored(2**64 - 1, None, tokens, "tenant")
    publisher.on_removed(2**64 - 1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(f"tcp://127.0.0.1:{ports[1]}")
        events = []
        while len(events) < 2:
            dealer.send_multipart([b"", len(events).to_bytes(8, "big")])
            while (reply := dealer.recv_multipart())[2] != END_NUMBER:
                events += msgspec.msgpack.decode(reply[3], type=KVEventBatch).events
    publisher.close()
    stored, removed = events
    assert isinstance(stored, BlockStored)
    assert (stored.block_hashes, stored.parent_block_hash) == ([2**64 - 1], None)
    assert (stored.token_ids, stored.block_size) == (tokens, BLOCK_TOKENS)
    assert (stored.medium, stored.extra_keys) == ("GPU", [("tenant",)])
    assert isinstance(removed, BlockRemoved)
    assert removed.block_hashes == [2**64 - 1]


@pytest.mark.thorough
async def test_our_nodes_with_vllm_publish_what_they_report_to_the_router(tmp_path):
    ports, rng = free_ports(4), random.Random(5)
    prompts = [[rng.randrange(3, 320) for _ in range(300)] for _ in range(12)]
    flags = ("--block-size", "32", "--skip-tokenizer-init", "--num-gpu-blocks-override", "60")
    cluster = Cluster(
        tmp_path,
        tiny("experts", tmp_path / "model"),
        flags=("--dtype", "float32"),
        vllm_flags=flags,
    )
    for node, (events, replay) in zip(cluster.nodes, (ports[:2], ports[2:]), strict=True):
        node.add_flags("--kv-events-endpoint", f"tcp://*:{events}")
        node.add_flags("--kv-events-replay-endpoint", f"tcp://*:{replay}")

    def reported():
        nodes = get(f"{cluster.url}/server_info")[1]["nodes"]
        return {node["role"]: node["prefixes"]["num_blocks"] for node in nodes}

    def are_equal(num_at_least):
        held = {"prefill": len(names(prefill)), "decode": len(names(decode))}
        return held == reported() and min(held.values()) >= num_at_least

    async def ask(prompt_ids):
        await asyncio.to_thread(cluster.generate, prompt_ids)
        for node in (prefill, decode):
            await until_async(lambda node=node: set(block_names(prompt_ids)) <= names(node))

    await asyncio.to_thread(cluster.__enter__)
    try:
        async with subscribed(*ports[:2]) as prefill, subscribed(*ports[2:]) as decode:
            for prompt_ids in prompts:
                await ask(prompt_ids)
            await until_async(lambda: are_equal(2))
            # 60 blocks hold fewer than six prompts.
            assert len(names(prefill)) < 2 * len(prompts)
            cluster.prefills[0].process.kill()
            await asyncio.to_thread(cluster.restore)
            old = set(block_names(prompts[-1]))
            await until_async(lambda: not old & names(prefill))
            await ask(prompts[0])
            await until_async(lambda: are_equal(2))
            assert not old & names(prefill)
    finally:
        cluster.__exit__()


@pytest.mark.thorough
async def test_subscriber_knows_what_a_plain_vllm_has_cached(tmp_path):
    port, events, replay = free_ports(3)
    publisher = {"enable_kv_cache_events": True, "publisher": "zmq"}
    publisher |= {"endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
    process = start(
        tmp_path / "log",
        *("vllm.entrypoints.cli.main", "serve", str(tiny("experts", tmp_path / "model"))),
        *("--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), *SERVE),
        *("--kv-events-config", json.dumps(publisher)),
        env={"VLLM_SERVER_DEV_MODE": "1"},
    )
    url, rng = f"http://127.0.0.1:{port}", random.Random(4)

    def is_up():
        assert process.is_running(), (tmp_path / "log").read_text()[-3000:]
        return get(f"{url}/health")[0] == 200

    def random_ids(num):
        return [rng.randrange(3, 320) for _ in range(num)]

    async def ask(prompt_ids, salt):
        """Return the number of prompt tokens that vLLM found, after the subscriber knows of the prompt."""
        body = {"model": "m", "prompt": prompt_ids, "max_tokens": 1, "detokenize": False}
        body |= {"cache_salt": salt} if salt else {}
        status, answer = await asyncio.to_thread(post, f"{url}/v1/completions", body)
        assert status == 200, answer
        await until_async(lambda: block_names(prompt_ids, salt)[-1] in names(subscriber))
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    try:
        assert await asyncio.to_thread(eventually, is_up, within_s=START_S)
        shared = [random_ids(4 * BLOCK_TOKENS) for _ in range(4)]
        await asyncio.to_thread(
            post, f"{url}/v1/completions", {"model": "m", "prompt": shared[0], "max_tokens": 1}
        )
        async with subscribed(events, replay) as subscriber:
            await until_async(lambda: names(subscriber) == set(block_names(shared[0])))
            num_found = []
            for number in range(60):
                # The last block is new, so its name shows that all events of the prompt have arrived.
                prefix = rng.choice(shared)[: BLOCK_TOKENS * rng.randrange(1, 5)]
                prompt_ids = prefix + random_ids(BLOCK_TOKENS + 5)
                salt = rng.choice(["", "", "tenant"])
                if number == 30:
                    # vLLM publishes this in its next step.
                    await asyncio.to_thread(post, f"{url}/reset_prefix_cache", {})
                    assert await ask(prompt_ids, salt) == 0
                    assert names(subscriber) == set(block_names(prompt_ids, salt))
                    continue
                if number % 10 == 5:  # several copies of blocks
                    unique = [prefix + random_ids(BLOCK_TOKENS) for _ in range(4)]
                    await asyncio.gather(*(ask(each, salt) for each in unique))
                known = names(subscriber)
                expected = 0
                for name in block_names(prompt_ids, salt):
                    if name not in known:
                        break
                    expected += 1
                assert await ask(prompt_ids, salt) // BLOCK_TOKENS == expected
                num_found.append(expected)
            assert {0, 1, 2, 3, 4} <= set(num_found)
            assert subscriber.follower.data_parallel_rank == 0
    finally:
        process.kill()
