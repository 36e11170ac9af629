"""Nodes that leave, drain and turn under their requests: no token is lost or repeated, and they end with 0."""

import asyncio
import contextlib
import json
import signal
import socket
import time
import urllib.error
import urllib.request

import pytest

from tandem.cli.up import free_ports
from tests.e2e.clients import (
    NUM_NEW,
    PROMPTS,
    QUIET,
    SIMULATED,
    are_up,
    expected,
    generate,
    load_of,
    nodes_of,
    stream_all,
    unaccounted,
)
from tests.e2e.cluster import ask, running, running_cluster
from tests.patience import PATIENCE_S, eventually
from tests.processes import Process

NUM_LONG = 12
LONG_PROMPTS = [[5 + index, 6, 7, 8, 9] * 80 for index in range(NUM_LONG)]


@pytest.fixture
def flags(embedded_model, profile):
    """Return those of nodes whose prompts and answers take long enough to be interrupted."""

    def make(step_ms: float) -> tuple[str, ...]:
        return ("--model", str(embedded_model), *SIMULATED, *QUIET, *profile(0.1, step_ms))

    return make


def post(url: str, **body) -> tuple[int, dict]:
    return ask(url, body)


def drain(*argv: str) -> tuple[int, str]:
    """Run `tandem drain`; return its status and what it wrote."""
    process = Process("drain", *argv)
    process.wait()
    told = process.output()
    return process.stop(), told


def detail(url: str) -> str:
    return ask(f"{url}/health")[1]["detail"]


def num_handed_over(url: str) -> int:
    """Of all replays those for this reason: nodes that stood still for a while are others' matter."""
    lines = ask(f"{url}/metrics")[1].splitlines()
    named = 'tandem_router_replays_total{error="node_draining"}'
    return sum(int(float(line.split()[-1])) for line in lines if line.startswith(named))


async def prompts_at_once(url: str, after_the_first) -> list[list[int]]:
    """Send long prompts at once; return their tokens in order."""
    async with asyncio.TaskGroup() as tasks:
        asked = [
            tasks.create_task(asyncio.to_thread(generate, url, input_ids=prompt, **PARAMS))
            for prompt in LONG_PROMPTS
        ]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        after_the_first()
    return [task.result()["output_ids"] for task in asked]


PARAMS = {"max_new_tokens": 5, "temperature": 0}


@pytest.mark.slow
@pytest.mark.parametrize(("timeout_s", "is_handed_over"), [("0.2", True), ("600", False)])
def test_no_client_notices_that_nodes_were_told_to_end_and_these_end_with_0(
    flags, embedded_model, timeout_s, is_handed_over
):
    # A stream of 50 s, which only a node that hands over leaves unfinished.
    long = long_stream if is_handed_over else contextlib.nullcontext
    node_flags = (*flags(8), "--drain-timeout-s", timeout_s, "--max-total-tokens", "32768")
    with running_cluster(*node_flags, prefills=2, decodes=2) as cluster:
        assert eventually(lambda: are_up(cluster.url))
        first_prefill = cluster.processes[0]
        with long(cluster.url):
            url = busiest_decode(cluster.url)
            decode = cluster.processes[2 + cluster.decode_urls.index(url)]
            streams = asyncio.run(stream_all(cluster.url, lambda: decode.signal(signal.SIGTERM)))
            assert streams == [expected(embedded_model, prompt, NUM_NEW) for prompt in PROMPTS]
            assert decode.wait() == 0
            assert (num_handed_over(cluster.url) > 0) == is_handed_over
        others = [cluster.prefill_urls[1], *(set(cluster.decode_urls) - {url})]

        answers = asyncio.run(
            prompts_at_once(cluster.url, lambda: first_prefill.signal(signal.SIGTERM))
        )
        assert answers == [expected(embedded_model, prompt, 5) for prompt in LONG_PROMPTS]
        assert first_prefill.wait() == 0
        assert eventually(lambda: not any(map(unaccounted, others)))


@pytest.mark.slow
def test_a_node_is_drained_turned_into_the_other_role_and_serves_in_it(flags, embedded_model):
    # Of those that the kernel gives to nobody: when it is let go, no connection of others takes it.
    port = free_ports(1)[0]
    with socket.create_server(("127.0.0.1", port)) as holder:
        decode_flags = ("--bootstrap-port", str(port))
        with (
            running_cluster(*flags(60), decodes=2, decode_flags=decode_flags) as cluster,
            long_stream(cluster.url) as stream,
        ):
            assert eventually(lambda: any(map(num_running, cluster.decode_urls)))
            url = next(url for url in cluster.decode_urls if num_running(url))
            (other,) = set(cluster.decode_urls) - {url}
            can_be_drained_and_serve_again(url)
            status, told = drain(url, "--timeout-s", "0")
            assert status == 0, told
            assert f"{url} is drained: nothing runs on it" in told
            assert eventually(lambda: num_handed_over(cluster.url) == 1)
            assert eventually(lambda: num_running(other) == 1), "it was handed over"
            assert stream.readline()
            is_drained(url)

            cannot_turn(url, port)
            holder.close()
            epoch = ask(f"{url}/server_info")[1]["epoch"]
            turn(url, "prefill")
            info = ask(f"{url}/server_info")[1]
            assert (info["role"], info["bootstrap_port"]) == ("prefill", port)
            assert info["epoch"] != epoch
            serves_as_prefill(url, other, embedded_model)

            ends_at_once(other, cluster.processes[1 + cluster.decode_urls.index(other)])


def busiest_decode(router: str) -> str:
    """Return the URL of the decode node with most requests, as the router counts them by itself."""
    decodes = [node for node in nodes_of(router) if node["role"] == "decode"]
    return max(decodes, key=lambda node: node["in_flight_requests"])["url"]


@contextlib.contextmanager
def long_stream(url: str):
    """A stream of minutes, once its first token came."""
    body = {"prompt": [5, 6], "max_tokens": 6000, "ignore_eos": True, "stream": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as response:
        assert response.readline()
        yield response


def num_running(url: str) -> int:
    return load_of(url)["num_running"]


def can_be_drained_and_serve_again(url: str) -> None:
    begun = time.monotonic()
    status, told = post(f"{url}/drain")
    took_s = time.monotonic() - begun
    assert (status, told["state"], told["num_left"]) == (200, "draining", 1)
    assert 30 - took_s <= told["remaining_s"] < 30.001  # the difference of two times is rounded
    assert detail(url) == "draining: 1 request left"
    status, refusal = post(f"{url}/role", role="prefill")
    assert (status, refusal["error"]["code"]) == (409, "not_now")
    assert "the node has 1 request; drain it first" in refusal["error"]["message"]
    assert drain(url, "--cancel") == (0, f"{url} is serving\n")
    assert ask(f"{url}/health")[0] == 200


def is_drained(url: str) -> None:
    """It says so, and holds nothing."""
    status, health = ask(f"{url}/health")
    assert (status, health["detail"][:8]) == (503, "drained;")
    info = ask(f"{url}/server_info")[1]
    assert (info["is_draining"], info["is_healthy"]) == (True, False)
    assert eventually(lambda: not unaccounted(url))  # its load is told twice a second


def cannot_turn(url: str, port: int) -> None:
    """The bootstrap port is taken: the node reports it, and can be changed back."""
    assert post(f"{url}/role", role="prefill")[1]["state"] == "turning"
    assert eventually(lambda: "the change to prefill failed" in detail(url))
    assert str(port) in detail(url)
    status, refusal = post(f"{url}/drain")
    assert (status, refusal["error"]["code"]) == (409, "not_now")
    turn(url, "decode")


def turn(url: str, role: str) -> None:
    status, told = post(f"{url}/role", role=role)
    assert (status, told["state"], told["role"]) == (200, "turning", role)
    assert f"changing to {role}" in told["detail"]
    assert eventually(lambda: detail(url) == "serving")


def serves_as_prefill(url: str, decode: str, model) -> None:
    """A router that is given the node as prefill, and no other, has it compute prompts."""
    nodes = ("--prefill", url, "--decode", decode, "--local-prefill-threshold", "0")
    with running("lb", *nodes, *QUIET) as (router, _):
        told = generate(router, input_ids=[5, 6, 7], **PARAMS)
        assert told["output_ids"] == expected(model, [5, 6, 7], 5)
        assert eventually(lambda: load_of(url)["prompt_tokens"] == 3)


def ends_at_once(url: str, node: Process) -> None:
    """A second signal does not wait for the stream that the first one lets finish."""
    node.signal(signal.SIGTERM)
    assert eventually(lambda: detail(url) == "draining before it exits: 1 request left")
    assert post(f"{url}/drain", cancel=True)[0] == 409
    node.signal(signal.SIGTERM)
    assert node.wait() == 1
    status, told = drain(url)
    assert status == 1
    assert "cannot be reached" in told
