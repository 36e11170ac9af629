import asyncio
import json
import os
import resource
import signal
import socket
import ssl
import sys
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import aiohttp
import pytest

from tandem.router.config import RouterConfig
from tandem.router.workers.launcher import EdgeLauncher
from tandem.wire.messages import Cancel, StartDecode, StartPrefill
from tests.certificates import make_certificates
from tests.fork_server import AsyncForked
from tests.patience import PATIENCE_S, until_async
from tests.processes import children, is_alive
from tests.router.fake_node import FakeNode

ROOT = Path(__file__).resolve().parents[2]
NOWHERE = ("--prefill", "http://127.0.0.1:1", "8998", "--decode", "http://127.0.0.1:2")


async def start(*flags: str, env=None) -> AsyncForked | asyncio.subprocess.Process:
    """Start a router: a fork, or a fresh process where it is to have an environment of its own."""
    if env is None:
        return await AsyncForked.start(["tandem.router", *flags])
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "tandem.router", *flags),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
        env=env,
    )


async def next_event(process, event: str) -> dict:
    async with asyncio.timeout(PATIENCE_S):
        async for line in process.stderr:
            logged = json.loads(line)
            if logged["event"] == event:
                return logged
    raise AssertionError(f"the router ended without {event}")


@asynccontextmanager
async def cluster_of_two_workers(*flags: str):
    """Yield a prefill, a decode, and process and URL of a router whose workers both serve.

    Without nodes, each start of one of several workers would wait for FIRST_PAIR_TIMEOUT_S.
    """
    async with FakeNode("prefill").serving() as prefill, FakeNode("decode").serving() as decode:
        nodes = ("--prefill", prefill.url, "--decode", decode.url)
        async with router(*nodes, "--workers", "2", *flags) as (process, url):
            await both_serving(url)
            yield prefill, decode, process, url


async def both_serving(url: str) -> None:
    async def are_serving() -> bool:
        _, info = await get_json(f"{url}/server_info")
        return [worker["is_serving"] for worker in info["workers"]] == [True, True]

    await until_async(are_serving)


@asynccontextmanager
async def router(*flags: str, env=None):
    """Yield a router's process and URL; it is gone afterwards."""
    process = await start("--port", "0", *flags, env=env)
    try:
        url = (await next_event(process, "router.listening"))["url"]
        await next_event(process, "edge_worker.ready")
        yield process, url
    finally:
        if process.returncode is None:
            process.terminate()
        await process.communicate()


def workers_of(process) -> list[int]:
    return children(process.pid)


@contextmanager
def only(process, index: int):
    """Have one of two workers accept all connections inside the block."""
    other = workers_of(process)[1 - index]
    os.kill(other, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(other, signal.SIGCONT)


async def test_router_with_a_low_file_limit_warns_at_startup():
    process = await asyncio.create_subprocess_exec(
        *(
            "prlimit",
            "--nofile=300:300",
            sys.executable,
            "-P",
            "-m",
            "tandem.router",
            "--port",
            "0",
            *NOWHERE,
        ),
        cwd=ROOT,
        stderr=asyncio.subprocess.PIPE,
    )
    told = await next_event(process, "descriptors.too_few")
    assert told["limit"] == 300
    assert f"ulimit -n {told['needed']}" in told["action"]
    await next_event(process, "edge_worker.ready")
    process.terminate()
    await process.communicate()


async def exit_status(process) -> int:
    async with asyncio.timeout(PATIENCE_S):
        return await process.wait()


async def get_json(url: str) -> tuple[int, dict]:
    async with aiohttp.ClientSession() as session, session.get(url) as response:
        return response.status, await response.json()


async def get_health(url: str) -> tuple[int, dict]:
    return await get_json(f"{url}/health")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_ends_router_and_workers_with_status_0(number):
    async with cluster_of_two_workers() as (_, _, process, _):
        workers = workers_of(process)
        assert len(workers) == 2
        process.send_signal(number)
        assert await exit_status(process) == 0
        assert not any(map(is_alive, workers))


async def test_crashed_worker_is_replaced():
    async with router(*NOWHERE) as (process, url):
        (worker,) = workers_of(process)
        os.kill(worker, signal.SIGKILL)
        crashed = await next_event(process, "edge_worker.crashed")
        assert crashed["status"] == -signal.SIGKILL
        await next_event(process, "edge_worker.ready")
        assert workers_of(process) != [worker]
        assert (await get_health(url))[0] == 503


async def test_worker_that_fails_to_restart_is_retried_and_ends_no_other():
    async with cluster_of_two_workers() as (_, _, process, url):
        first, _ = workers_of(process)
        _, hard = limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (3, hard))
        os.kill(first, signal.SIGKILL)
        await next_event(process, "edge_worker.not_started")
        assert (await get_health(url))[0] == 200
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, limits)
        await until_async(lambda: len(workers_of(process)) == 2)


async def test_signal_while_a_worker_restarts_ends_the_router():
    async with router(*NOWHERE) as (process, _):
        (worker,) = workers_of(process)
        os.kill(worker, signal.SIGKILL)
        await next_event(process, "edge_worker.crashed")
        process.terminate()
        assert await exit_status(process) == 0


async def test_second_signal_kills_a_worker_that_is_being_spawned(monkeypatch):
    config = RouterConfig(discovers_announced=True)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        launcher = EdgeLauncher(config, sock, [], "")
        spawned = []

        async def signalled_twice(*_fds):
            process = await asyncio.create_subprocess_exec("sleep", "600")
            spawned.append(process)
            launcher._on_signal(delay_s=600.0, drain_s=600.0)
            launcher._on_signal(delay_s=600.0, drain_s=600.0)
            return process

        monkeypatch.setattr(launcher, "_spawn", signalled_twice)
        async with asyncio.timeout(PATIENCE_S):
            assert await launcher.run() == 0
        assert [each.returncode for each in spawned] == [-signal.SIGKILL]


async def test_workers_exit_when_their_parent_is_killed():
    async with router(*NOWHERE) as (process, _):
        (worker,) = workers_of(process)
        process.kill()
        await until_async(lambda: not is_alive(worker))


async def test_port_in_use_is_rejected_with_a_remedy():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = await start(*NOWHERE, "--port", str(taken.getsockname()[1]))
        _, said = await process.communicate()
    assert process.returncode == 2
    assert b"use a different --port" in said


async def test_missing_tokenizer_ends_the_router_without_restarts(tmp_path):
    process = await start(*NOWHERE, "--port", "0", "--tokenizer", str(tmp_path))
    _, said = await process.communicate()
    assert process.returncode == 2
    assert b"no tokenizer.json" in said


async def test_router_whose_worker_cannot_start_exits_with_its_error(tmp_path):
    # Found before the worker's own packages: it fails at its start, every time.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if 'tandem.router.workers.worker' in sys.orig_argv:\n"
        "    os.write(2, b'no luck today\\n')\n"
        "    os._exit(3)\n"
        "from tandem.router.workers import launcher\n"
        "launcher.RESTART_PAUSE_S = 0.0\n"
    )
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = await start(*NOWHERE, "--port", "0", env={**os.environ, "PYTHONPATH": paths})
    async with asyncio.timeout(PATIENCE_S):
        _, said = await process.communicate()
    assert process.returncode == 3
    assert said.count(b"no luck today") == 3
    assert b"router.cannot_start" in said


async def test_every_worker_uses_tls_and_the_api_key_file(tmp_path):
    files = make_certificates(tmp_path)
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsk-one\n")
    trusting = ssl.create_default_context(cafile=files.ca)
    tls = ("--ssl-certfile", files.cert, "--ssl-keyfile", files.key)
    async with (
        router(*NOWHERE, *tls, "--api-key-file", str(keys)) as (_, url),
        aiohttp.ClientSession(url) as client,
    ):
        assert url.startswith("https://")
        for headers, status in (({}, 401), ({"Authorization": "bearer sk-one"}, 503)):
            async with client.get("/v1/models", headers=headers, ssl=trusting) as response:
                assert response.status == status
        (tmp_path / "renewed").mkdir()
        renewed = make_certificates(tmp_path / "renewed")
        for old, new in ((files.cert, renewed.cert), (files.key, renewed.key)):
            os.replace(new, old)
        trusting = ssl.create_default_context(cafile=renewed.ca)
        await until_async(lambda: is_trusted(url, trusting))


async def is_trusted(url: str, trusting: ssl.SSLContext) -> bool:
    """Return whether a new connection is served with a certificate of this authority."""
    try:
        async with aiohttp.ClientSession(url) as client, client.get("/live", ssl=trusting):
            return True
    except aiohttp.ClientConnectorCertificateError:
        return False


class KeyUser:
    """A client with a key, whose requests run until it ends."""

    def __init__(self, url: str, key: str, decode: FakeNode) -> None:
        self._url, self._decode = url, decode
        self._headers, self._running = {"Authorization": f"Bearer {key}"}, []

    async def status(self, path: str = "/generate") -> int:
        """Return how a new connection is answered."""
        body = {"input_ids": [1, 2, 3], "stream": True}
        async with (
            aiohttp.ClientSession(headers=self._headers) as session,
            session.post(f"{self._url}{path}", json=body) as response,
        ):
            return response.status

    async def is_admitted(self) -> bool:
        """Send a request; return whether it reached decode, where it stays."""
        asking = asyncio.create_task(self.status())
        self._running.append(asking)
        await until_async(lambda: asking.done() or not self._decode.engine.is_idle())
        if asking.done():
            assert asking.result() in {429, 503}  # 503: the worker has not met the nodes
            return False
        await self._decode.engine.next(StartDecode)
        return True

    async def leave(self) -> None:
        for asking in self._running:
            asking.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)


async def test_key_limits_and_key_files_hold_for_both_workers_and_are_read_again(tmp_path):
    keys, limits = tmp_path / "keys", tmp_path / "limits.toml"
    keys.write_text("sk-one\n")
    limits.write_text("[default]\nrequests_in_flight = 1\n")
    flags = ("--workers", "2", "--api-key-file", str(keys), "--key-limits", str(limits))
    async with FakeNode("prefill").serving() as prefill, FakeNode("decode").serving() as decode:
        nodes = ("--prefill", prefill.url, "--decode", decode.url)
        async with router(*nodes, *flags) as (process, url):
            user = KeyUser(url, "sk-one", decode)
            with only(process, 0):
                await until_async(user.is_admitted)
            with only(process, 1):
                await until_returns(user.status, 429)
            os.kill(workers_of(process)[0], signal.SIGKILL)
            await next_event(process, "edge_worker.crashed")
            assert await user.is_admitted()
            limits.write_text("[default]\nrequests_in_flight = 2\n")
            await until_async(user.is_admitted)
            assert await user.status() == 429
            keys.write_text("sk-another\n")
            for _ in range(8):  # connections, of either worker
                await until_returns(user.status, 401)
            await user.leave()


async def num_answering(url: str, trusting: ssl.SSLContext) -> int:
    async with (
        aiohttp.ClientSession(url) as client,
        client.get("/server_info", ssl=trusting) as response,
    ):
        return len((await response.json())["workers"])


@pytest.mark.thorough
async def test_missing_tls_files_fail_only_the_worker_that_restarts(tmp_path):
    files = make_certificates(tmp_path)
    trusting = ssl.create_default_context(cafile=files.ca)
    tls = ("--ssl-certfile", files.cert, "--ssl-keyfile", files.key)
    told = ("--workers", "2", "--log-level", "debug")  # by the second worker, too
    async with router(*NOWHERE, *tls, *told) as (process, url):
        await next_event(process, "edge_worker.ready")  # of the other: it has read the files
        first, second = workers_of(process)
        os.rename(files.key, tmp_path / "moved")
        os.kill(first, signal.SIGKILL)
        while (await next_event(process, "edge_worker.crashed"))["status"] != 2:
            pass
        os.rename(tmp_path / "moved", files.key)
        await until_returns(lambda: num_answering(url, trusting), 2)
        assert second in workers_of(process)


async def test_invalid_tls_files_end_the_router_with_one_sentence(tmp_path):
    files = make_certificates(tmp_path)
    process = await start(*NOWHERE, "--ssl-certfile", files.cert, "--ssl-keyfile", files.other_key)
    _, said = await process.communicate()
    assert process.returncode == 2
    assert said.decode() == (
        f"tandem lb: error: --ssl-keyfile {files.other_key}: is not the key of {files.cert}\n"
    )


@asynccontextmanager
async def posted(prefill, decode, url):
    """Post a streamed request, yield the response and what its nodes were told."""
    body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 3}, "stream": True}
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        posting = tasks.create_task(session.post(f"{url}/generate", json=body))
        starts = [await prefill.engine.next(StartPrefill), await decode.engine.next(StartDecode)]
        prefill.engine.say(starts[0], 0, [10], "handed_off")
        async with await posting as response:
            yield response, *starts


async def test_ipv6_client_streams_and_its_disconnect_cancels():
    async with FakeNode("prefill").serving() as prefill, FakeNode("decode").serving() as decode:
        flags = ("--prefill", prefill.url, "--decode", decode.url, "--host", "::1")
        async with router(*flags) as (_, url):
            await until_returns(lambda: healths(url), {200})
            assert url.startswith("http://[::1]:")
            async with posted(prefill, decode, url) as (response, _, start_decode):
                decode.engine.say(start_decode, 0, [10, 11, 12], "length")
                events = (await response.text()).split("\n\n")
                assert json.loads(events[-3].removeprefix("data: "))["output_ids"] == [10, 11, 12]
            async with posted(prefill, decode, url) as (response, _, _):
                await response.content.readline()
            await decode.engine.next(Cancel)


class Client:
    """One connection, kept alive, and the stream that runs on it."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self._url = session, url

    async def begin(self, name: str, prefill, decode) -> None:
        """Start a stream and read its first token."""
        body = {"input_ids": [1, 2], "rid": name, "stream": True}
        body["sampling_params"] = {"max_new_tokens": 3}
        posting = asyncio.ensure_future(self.session.post(f"{self._url}/generate", json=body))
        start_prefill = await prefill.engine.next(StartPrefill)
        self.start = await decode.engine.next(StartDecode)
        prefill.engine.say(start_prefill, 0, [10], "handed_off")
        self.response = await posting
        assert b"[10]" in await self.response.content.readline()

    async def delete(self, path: str) -> dict:
        async with self.session.delete(f"{self._url}{path}") as response:
            assert response.status == 200
            return await response.json()

    async def rest(self) -> str:
        async with asyncio.timeout(PATIENCE_S):
            return (await self.response.read()).decode()

    async def get(self, path: str) -> str:
        async with self.session.get(f"{self._url}{path}") as response:
            return await response.text()

    async def status(self, path: str) -> int:
        async with self.session.get(f"{self._url}{path}") as response:
            return response.status

    async def post(self, path: str, body) -> dict:
        async with self.session.post(f"{self._url}{path}", json=body) as response:
            return await response.json()


@asynccontextmanager
async def clients_of(url: str, count: int):
    async with AsyncExitStack() as stack:
        sessions = [await stack.enter_async_context(aiohttp.ClientSession()) for _ in range(count)]
        yield [Client(session, url) for session in sessions]


async def until_returns(ask, expected) -> None:
    async def is_expected() -> bool:
        return await ask() == expected

    await until_async(is_expected)


async def streams(client: Client) -> list[int]:
    """Return how many streams each worker has."""
    workers = json.loads(await client.get("/server_info"))["workers"]
    return [worker["num_streams"] for worker in workers]


async def test_worker_crash_keeps_streams_of_other_workers_and_is_replaced():
    async with (
        cluster_of_two_workers() as (prefill, decode, process, url),
        clients_of(url, 3) as (one, two, later),
    ):
        for index, client in enumerate((one, two)):
            with only(process, index):
                await client.begin(["one", "two"][index], prefill, decode)
        await until_returns(lambda: streams(two), [1, 1])
        first = workers_of(process)[0]
        os.kill(first, signal.SIGKILL)
        await next_event(process, "edge_worker.crashed")
        await both_serving(url)
        with only(process, 1):  # the successor comes after the other one
            await later.begin("later", prefill, decode)
        await until_returns(lambda: streams(later), [1, 1])
        for client in (one, two, later):
            decode.engine.say(client.start, 1, [11, 12], "length")
        ends = await asyncio.gather(one.rest(), two.rest(), return_exceptions=True)
        (whole,) = [end for end in ends if not isinstance(end, aiohttp.ClientPayloadError)]
        for end in (whole, await later.rest()):
            assert "[10,11,12]" in end
            assert "[DONE]" in end


async def healths(url: str) -> set[int]:
    """Return what several new connections are answered."""
    async with clients_of(url, 8) as clients:
        return {await client.status("/health") for client in clients}


@pytest.mark.parametrize("num_workers", ["1", "2"])
async def test_stopping_router_reports_it_and_serves_late_requests(num_workers):
    async with FakeNode("prefill").serving() as prefill, FakeNode("decode").serving() as decode:
        nodes = ("--prefill", prefill.url, "--decode", decode.url, "--workers", num_workers)
        async with (
            router(*nodes, "--shutdown-delay-s", "600") as (process, url),
            clients_of(url, 2) as (before, after),
        ):
            await until_returns(lambda: healths(url), {200})
            await before.begin("before", prefill, decode)
            process.terminate()
            await until_returns(lambda: healths(url), {503})
            assert (await get_json(f"{url}/live"))[0] == 200
            await after.begin("after", prefill, decode)
            assert "Connection" not in before.response.headers
            assert after.response.headers["Connection"] == "close"
            for client in (before, after):
                decode.engine.say(client.start, 1, [11, 12], "length")
                assert "[10,11,12]" in await client.rest()
            process.terminate()
            assert await exit_status(process) == 0


async def info_of_all(client: Client) -> dict:
    """Return what all workers say together. One that was too busy to answer the asked one is asked again."""
    async with asyncio.timeout(PATIENCE_S):
        while "silent_workers" in (info := json.loads(await client.get("/server_info"))):
            pass
    return info


async def is_aborted(client: Client, name: str) -> bool:
    """Abort a request, whichever worker has it; one that was too busy to answer may have done it all the same."""
    was_silent = False
    async with asyncio.timeout(PATIENCE_S):
        while not (answer := await client.post("/abort_request", {"rid": name}))["aborted"]:
            if "silent_workers" not in answer:
                return was_silent
            was_silent = True
    return True


async def test_each_worker_reports_and_aborts_same_id_requests_of_all_workers():
    async with (
        cluster_of_two_workers() as (prefill, decode, process, url),
        clients_of(url, 4) as (one, two, asking, other),
    ):
        for index, client in enumerate((one, two)):
            with only(process, index):
                await client.begin("mine", prefill, decode)
        for index, client in enumerate((asking, other)):
            with only(process, index):
                assert await client.status("/health") == 200
            info = await info_of_all(client)
            assert [node["in_flight_requests"] for node in info["nodes"]] == [2, 2]
            lines = (await client.get("/metrics")).splitlines()
            assert 'tandem_router_requests_in_flight{model_name="m"} 2.0' in lines
            assert 'tandem_router_nodes_up{role="decode"} 1.0' in lines
        await until_returns(lambda: streams(asking), [1, 1])
        assert await is_aborted(asking, "mine")
        assert all("abort" in end for end in await asyncio.gather(one.rest(), two.rest()))
        assert not (await asking.post("/abort_request", {"rid": "mine"}))["aborted"]


ANNOUNCED = "127.0.0.1:1"


async def is_known(client: Client) -> bool:
    """Return whether the worker behind a connection knows the announced node."""
    nodes = json.loads(await client.get("/nodes"))["nodes"]
    return any(node["id"] == ANNOUNCED and node["state"] != "leaving" for node in nodes)


async def silent_workers(url: str) -> list[int]:
    _, info = await get_json(f"{url}/server_info")
    return info.get("silent_workers", [])


async def all_know_at_once(clients: list[Client], body: dict) -> bool:
    """Announce a node to one worker, and remove it at the other. False if one was too busy to be told at once."""
    added = await clients[0].post("/nodes", body)
    assert added["id"] == ANNOUNCED
    known_then = [await is_known(client) for client in clients]
    removed = await clients[1].delete(f"/nodes/{ANNOUNCED}")
    known_at_last = [await is_known(client) for client in clients]
    if "silent_workers" in added | removed:
        return False
    assert known_then == [True, True]
    assert known_at_last == [False, False]
    return True


async def test_announcement_to_one_worker_reaches_all_and_restarted_workers():
    async with cluster_of_two_workers("--discover-announced") as (_, _, process, url):
        async with clients_of(url, 2) as clients:
            body = {"url": f"http://{ANNOUNCED}", "role": "decode", "ttl_s": 600}
            await until_returns(lambda: all_know_at_once(clients, body), True)
            await clients[1].post("/nodes", body)
        for pid in workers_of(process):
            os.kill(pid, signal.SIGKILL)
            await until_async(lambda pid=pid: not is_alive(pid))
        await until_returns(lambda: silent_workers(url), [])
        async with clients_of(url, 2) as clients:
            assert [await is_known(client) for client in clients] == [True, True]


@pytest.mark.thorough
async def test_worker_pool_directory_is_removed_at_exit(tmp_path):
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    async with router(*NOWHERE, "--workers", "2", env=env) as (process, _):
        assert list(tmp_path.iterdir())
        process.terminate()
        assert await exit_status(process) == 0
        assert not list(tmp_path.iterdir())
