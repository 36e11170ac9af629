"""Nodes that leave, drain and turn under their requests: no token is lost or repeated, and they end with 0."""

import asyncio
import json
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

import pytest

from tests.e2e.cluster import ROOT, Process, eventually, get_json, running_cluster, wait_healthy
from tests.e2e.test_deaths import NUM_NEW, PROMPTS, stream_all, unaccounted
from tests.e2e.test_simulated import FLAGS, QUIET, are_up, expected, generate
from tandem.up import free_ports

# Answers of more than a second, prompts of a twentieth: long enough to be interrupted.
PROFILE = '{"prefill": {"per_token_ms": 0.1}, "decode": {"base_ms": 5}}'
NUM_LONG = 12
LONG_PROMPTS = [[5 + index, 6, 7, 8, 9] * 80 for index in range(NUM_LONG)]


@pytest.fixture
def flags(embedded_model, tmp_path):
    profile = tmp_path / "profile.json"
    profile.write_text(PROFILE)
    return ("--model", str(embedded_model), *FLAGS, *QUIET, "--sim-profile", str(profile))


def post(url: str, **body) -> tuple[int, dict]:
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())


def drain(*argv: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tandem", "drain", *argv]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def detail(url: str) -> str:
    return get_json(f"{url}/health")[1]["detail"]


def num_replays(url: str) -> int:
    lines = get_json(f"{url}/metrics")[1].splitlines()
    return int(
        sum(float(line.split()[-1]) for line in lines if line.startswith("tandem_replays_total{"))
    )


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
@pytest.mark.parametrize(("timeout_s", "is_handed_over"), [("0.2", True), ("30", False)])
def test_no_client_notices_that_nodes_were_told_to_end_and_these_end_with_0(
    flags, embedded_model, timeout_s, is_handed_over
):
    node_flags = (*flags, "--drain-timeout-s", timeout_s)
    with running_cluster(*node_flags, prefills=2, decodes=2) as cluster:
        assert eventually(lambda: all(are_up(cluster.url)))
        first_prefill, _, first_decode, *_ = cluster.processes
        others = [cluster.prefill_urls[1], cluster.decode_urls[1]]

        streams = asyncio.run(
            stream_all(cluster.url, lambda: first_decode.signal(signal.SIGTERM))
        )
        assert streams == [expected(embedded_model, prompt, NUM_NEW) for prompt in PROMPTS]
        assert first_decode.wait(10) == 0
        assert (num_replays(cluster.url) > 0) == is_handed_over

        answers = asyncio.run(
            prompts_at_once(cluster.url, lambda: first_prefill.signal(signal.SIGTERM))
        )
        assert answers == [expected(embedded_model, prompt, 5) for prompt in LONG_PROMPTS]
        assert first_prefill.wait(10) == 0
        assert eventually(lambda: not any(map(unaccounted, others)))


@pytest.mark.slow
def test_a_node_is_drained_turned_into_the_other_role_and_serves_in_it(flags, embedded_model):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        decode_flags = ("--bootstrap-port", str(port))
        with running_cluster(*flags, decodes=2, decode_flags=decode_flags) as cluster:
            assert eventually(lambda: all(are_up(cluster.url)))
            first = cluster.decode_urls[0]
            drain_it(cluster, first, embedded_model)
            cannot_turn(first, port)
            holder.close()
            epoch = get_json(f"{first}/server_info")[1]["epoch"]
            turn(first, "prefill")
            info = get_json(f"{first}/server_info")[1]
            assert (info["role"], info["bootstrap_port"]) == ("prefill", port)
            assert info["epoch"] != epoch
            serves_as_prefill(cluster, first, embedded_model)


def drain_it(cluster, url: str, model) -> None:
    """Drain a decode node under its streams, with `tandem drain`."""
    drained = []
    streams = asyncio.run(
        stream_all(cluster.url, lambda: drained.append(drain(url, "--timeout", "0.1")))
    )
    assert streams == [expected(model, prompt, NUM_NEW) for prompt in PROMPTS]
    (told,) = drained
    assert told.returncode == 0, told.stderr
    assert f"{url} is drained: nothing runs on it" in told.stdout
    assert num_replays(cluster.url) > 0
    assert not unaccounted(url)
    assert detail(url).startswith("drained")
    info = get_json(f"{url}/server_info")[1]
    assert (info["is_draining"], info["is_healthy"]) == (True, False)


def cannot_turn(url: str, port: int) -> None:
    """The port of grants is taken: the node says so, and is turned back."""
    assert post(f"{url}/role", role="prefill")[1]["state"] == "turning"
    assert eventually(lambda: "could not become prefill" in detail(url), 30)
    assert str(port) in detail(url)
    status, refusal = post(f"{url}/drain")
    assert (status, refusal["error"]["code"]) == (409, "not_now")
    turn(url, "decode")


def turn(url: str, role: str) -> None:
    status, told = post(f"{url}/role", role=role)
    assert (status, told["state"], told["role"]) == (200, "turning", role)
    assert f"turning into {role}" in detail(url)
    assert eventually(lambda: detail(url) == "serving", 30)


def serves_as_prefill(cluster, url: str, model) -> None:
    """A router that is given the node as prefill, and no other, has it compute prompts."""
    port = free_ports(1)[0]
    router = Process(
        *("lb", "--prefill", url, "--decode", cluster.decode_urls[1]),
        *("--port", str(port), *QUIET),
    )
    try:
        wait_healthy(f"http://127.0.0.1:{port}", router)
        told = generate(f"http://127.0.0.1:{port}", input_ids=[5, 6, 7], **PARAMS)
        assert told["output_ids"] == expected(model, [5, 6, 7], 5)
        assert get_json(f"{url}/server_info")[1]["load"]["prompt_tokens"] == 3
    finally:
        router.stop()


@pytest.mark.slow
def test_a_drain_shows_what_is_left_can_be_ended_and_a_second_signal_forces(flags):
    with running_cluster(*flags) as cluster:
        url, node = cluster.decode_urls[0], cluster.processes[1]
        prompt = {"input_ids": [5, 6], "max_new_tokens": 5000, "ignore_eos": True}
        with endless(cluster.url, prompt):
            assert eventually(lambda: post(f"{url}/drain", cancel=True)[1]["num_left"] == 1)
            status, told = post(f"{url}/drain")
            assert (status, told["state"], told["num_left"]) == (200, "draining", 1)
            assert 25 < told["remaining_s"] <= 30
            assert detail(url) == "draining: 1 requests left"
            status, refusal = post(f"{url}/role", role="prefill")
            assert (status, "drain it first" in refusal["error"]["message"]) == (409, True)
            told = drain(url, "--cancel")
            assert (told.returncode, told.stdout) == (0, f"{url} is serving\n")
            assert detail(url) == "serving"
            node.signal(signal.SIGTERM)
            assert eventually(lambda: detail(url) == "draining: 1 requests left, and ends then")
            assert post(f"{url}/drain", cancel=True)[0] == 409
            node.signal(signal.SIGTERM)
            assert node.wait(10) == 1
    told = drain(url)
    assert (told.returncode, told.stdout) == (1, "")
    assert "cannot be reached" in told.stderr


class endless:
    """A stream that is not read to its end."""

    def __init__(self, url: str, body: dict) -> None:
        data = json.dumps({**body, "stream": True}).encode()
        self._response = urllib.request.urlopen(
            urllib.request.Request(
                f"{url}/generate", data, {"Content-Type": "application/json"}
            ),
            timeout=60,
        )

    def __enter__(self):
        self._response.readline()

    def __exit__(self, *_raised):
        self._response.close()
