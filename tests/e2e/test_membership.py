"""Real nodes and routers that come and go: nobody's stream notices. The engine is simulated."""

import asyncio
import contextlib
import signal
from urllib.parse import quote

import pytest

from tandem.cli.up import free_ports
from tests.e2e.clients import (
    NUM_NEW,
    PROMPTS,
    QUIET,
    SIMULATED,
    expected,
    stream_all,
    unaccounted,
)
from tests.e2e.cluster import START_TIMEOUT_S, ask, wait_healthy
from tests.patience import eventually
from tests.processes import Process

SECRET = {"TANDEM_CLUSTER_KEY": "a secret of this test"}


@pytest.fixture
def flags(embedded_model, profile) -> tuple[str, ...]:
    """Of nodes whose answers take three seconds."""
    model = ("--model", str(embedded_model))
    return (*model, *SIMULATED, *QUIET, "--sim-kv", "none", *profile(0.01, 10))


@pytest.fixture
def start():
    """Return a function that starts a process and returns it with its URL; all end with the test."""
    processes = []

    def start_one(*argv: str, port: int = 0) -> tuple[Process, str]:
        port = port or free_ports(1)[0]
        processes.append(Process(*argv, "--port", str(port), env=SECRET))
        return processes[-1], f"http://127.0.0.1:{port}"

    yield start_one
    for process in processes:
        process.interrupt()
    for process in processes:
        process.stop()


def change(method: str, at: str, key: str, **body) -> int:
    """Ask for a change with an operator's key; return the status."""
    return ask(at, body or None, method=method, headers={"Authorization": f"Bearer {key}"})[0]


def operator_key() -> str:
    process = Process("operator-key", env=SECRET)
    assert process.wait() == 0
    key = process.output().strip()
    process.stop()
    return key


def answers(url: str) -> bool:
    with contextlib.suppress(OSError):
        return ask(f"{url}/health")[0] in {200, 503}
    return False


def states(router: str) -> dict[str, str]:
    return {node["url"]: node["state"] for node in ask(f"{router}/nodes")[1]["nodes"]}


def all_workers_have(router: str, *urls: str) -> bool:
    """Tell whether each edge worker serves with these nodes; each meets a node by itself."""
    info = ask(f"{router}/server_info")[1]
    if info.get("silent_workers") or not all(worker["is_serving"] for worker in info["workers"]):
        return False
    # What one worker knows of nodes is its own: those that answer take turns.
    return all(
        states(router).get(url) == "up" for _ in range(2 * len(info["workers"])) for url in urls
    )


async def first_of(streaming: asyncio.Future, flowing: asyncio.Event) -> None:
    """Wait until streams flow, or have failed before."""
    flows = asyncio.ensure_future(flowing.wait())
    await asyncio.wait([streaming, flows], return_when=asyncio.FIRST_COMPLETED)
    flows.cancel()


def all_expected(flags) -> list[list[int]]:
    return [expected(flags[1], prompt, NUM_NEW) for prompt in PROMPTS]


@pytest.mark.slow
def test_nodes_are_added_handed_over_and_started_anew_under_a_router_that_runs(flags, start):
    key = operator_key()
    router_process, router = start("lb", "--discover-announced", "--workers", "2", *QUIET)
    bootstrap_port = free_ports(1)[0]
    prefill, prefill_url = start("prefill", *flags, "--bootstrap-port", str(bootstrap_port))
    first, first_url = start("decode", *flags)
    second, second_url = start("decode", *flags)
    assert eventually(lambda: answers(router), within_s=START_TIMEOUT_S)
    assert change("POST", f"{router}/nodes", "wrong", url=first_url) == 401
    for url in (prefill_url, first_url):
        assert change("POST", f"{router}/nodes", key, url=url) == 200
    wait_healthy(router, router_process, prefill, first, second)
    assert eventually(lambda: all_workers_have(router, prefill_url, first_url))

    def hand_over() -> None:
        assert change("POST", f"{router}/nodes", key, url=second_url, role="decode") == 200
        assert eventually(lambda: all_workers_have(router, second_url))
        named = quote(first_url, safe="")
        assert change("DELETE", f"{router}/nodes/{named}?now=1", key) == 200

    async def streams() -> list[list[int]]:
        flowing = asyncio.Event()
        streaming = asyncio.ensure_future(stream_all(router, flowing.set))
        await first_of(streaming, flowing)
        await asyncio.to_thread(hand_over)
        return await streaming

    assert asyncio.run(streams()) == all_expected(flags)
    assert eventually(lambda: set(states(router)) == {prefill_url, second_url})
    nodes = (prefill_url, first_url, second_url)
    assert eventually(lambda: not any(map(unaccounted, nodes)))

    second.signal(signal.SIGKILL)
    second.wait()
    assert eventually(lambda: states(router).get(second_url) == "down")
    again, _ = start("decode", *flags, port=int(second_url.rpartition(":")[2]))
    wait_healthy(second_url, again)
    # Within 5 s, which a crowded machine must not decide here: tests/router/test_cluster.py counts them.
    assert eventually(lambda: all_workers_have(router, second_url))
    assert asyncio.run(stream_all(router)) == all_expected(flags)
