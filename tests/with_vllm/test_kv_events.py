"""KV events of an unmodified vLLM, and our own in vLLM's types."""

import asyncio
import json
import random
from contextlib import suppress

import pytest

from tandem.cli.up import free_ports
from tandem.stock.kv_events import KvEventSubscriber
from tandem.wire.prefixes import BLOCK_TOKENS, block_names
from tests.patience import eventually, until_async
from tests.with_vllm.models import tiny
from tests.with_vllm.nodes import START_S, get, post, start

SERVE = (
    *("--enforce-eager", "--skip-tokenizer-init", "--dtype", "float32", "--block-size", "32"),
    *("--enable-prompt-tokens-details", "--num-gpu-blocks-override", "80"),
)


def names(subscriber):
    changes = subscriber.follower.journal.since(0)
    return set() if changes is None else set(changes.added)


@pytest.mark.thorough
async def test_subscriber_knows_what_a_plain_vllm_has_cached(tmp_path):
    port, events, replay = free_ports(3)
    endpoints = [f"tcp://127.0.0.1:{each}" for each in (events, replay)]
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

    subscriber = KvEventSubscriber(*endpoints)
    try:
        assert await asyncio.to_thread(eventually, is_up, within_s=START_S)
        shared = [random_ids(4 * BLOCK_TOKENS) for _ in range(4)]
        await asyncio.to_thread(
            post, f"{url}/v1/completions", {"model": "m", "prompt": shared[0], "max_tokens": 1}
        )
        following = asyncio.create_task(subscriber.run())
        await until_async(lambda: names(subscriber) == set(block_names(shared[0])))
        num_found = []
        for number in range(60):
            # The last block is new, so its name shows that all events of the prompt have arrived.
            prefix = rng.choice(shared)[: BLOCK_TOKENS * rng.randrange(1, 5)]
            prompt_ids, salt = prefix + random_ids(BLOCK_TOKENS + 5), rng.choice(["", "", "tenant"])
            if number == 30:
                # vLLM publishes this in its next step.
                assert (await asyncio.to_thread(post, f"{url}/reset_prefix_cache", {}))[0] == 200
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
        assert subscriber.follower.num_malformed == 0
        following.cancel()
        with suppress(asyncio.CancelledError):
            await following
    finally:
        process.kill()
