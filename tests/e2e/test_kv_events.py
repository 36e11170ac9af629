"""KV events of running nodes, against what they report to the router."""

import asyncio
import random
from contextlib import asynccontextmanager, suppress

from tandem.cli.up import free_ports
from tandem.stock.kv_events import KvEventSubscriber
from tandem.wire.prefixes import block_names
from tests.e2e.clients import QUIET, SIMULATED, generate, nodes_of
from tests.e2e.cluster import running_cluster, wait_healthy
from tests.patience import until_async
from tests.processes import Process
from tests.tiny_models import VOCAB_SIZE


@asynccontextmanager
async def subscribed(events, replay):
    ports = (f"tcp://127.0.0.1:{port}" for port in (events, replay))
    subscriber = KvEventSubscriber(*ports, idle_s=0.1)
    task = asyncio.create_task(subscriber.run())

    def names():
        changes = subscriber.follower.journal.since(0)
        return set() if changes is None else set(changes.added)

    try:
        yield names
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def flags_of(events, replay):
    return (
        *("--kv-events-endpoint", f"tcp://*:{events}"),
        *("--kv-events-replay-endpoint", f"tcp://*:{replay}"),
    )


async def test_subscribers_hold_what_the_nodes_report_to_the_router(tiny_model):
    ports, rng = free_ports(4), random.Random(6)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(370)] for _ in range(25)]
    flags = ("--model", str(tiny_model("llama")), *SIMULATED, *QUIET)
    own = [flags_of(*ports[:2]), flags_of(*ports[2:])]

    def counts():
        found = {node["role"]: node["prefixes"]["num_blocks"] for node in nodes_of(cluster.url)}
        return [found["prefill"], found["decode"]]

    with running_cluster(*flags, prefill_flags=own[0], decode_flags=own[1]) as cluster:

        async def ask(prompt, salt=""):
            body = {"input_ids": prompt, "max_new_tokens": 40, "ignore_eos": True}
            body |= {"cache_salt": salt} if salt else {}
            answer = await asyncio.to_thread(generate, cluster.url, **body)
            assert "output_ids" in answer, answer
            return block_names(prompt + answer["output_ids"][:-1], salt)

        async with subscribed(*ports[:2]) as prefill, subscribed(*ports[2:]) as decode:
            # The pool holds 8192 tokens, so the first prompts are evicted.
            answered = [await ask(prompt, "tenant" * (i % 2)) for i, prompt in enumerate(prompts)]
            await until_async(
                lambda: {*answered[-1][:2]} <= prefill() and {*answered[-1]} <= decode()
            )
            await until_async(lambda: [len(prefill()), len(decode())] == counts())
            assert not {*answered[0]} & (prefill() | decode())
            node = cluster.processes[0]
            node.kill()
            node.stop()
            again = cluster.processes[0] = Process(*node.argv)
            await asyncio.to_thread(wait_healthy, cluster.url, again)
            await until_async(lambda: not prefill())
            names = await ask(prompts[0])
            await until_async(lambda: prefill() == {*names[:2]} and {*names} <= decode())
