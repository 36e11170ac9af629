import asyncio
import contextlib
import json

from benchmarks.http_load import Load, Plan
from benchmarks.router_latency import Quantiles, Row, verdicts
from benchmarks.stub_http import EVENT, Streams, StubConnection
from tests.patience import PATIENCE_S


def row(name: str, beside_p99: float | None, cpu_us: float) -> Row:
    direct = Quantiles(0.5, 1.0)
    beside = None if beside_p99 is None else Quantiles(0.5, beside_p99 - 1.0)
    return Row(name, direct, Quantiles(1.0, 2.0), beside, 1000.0, cpu_us, 0)


def test_the_goal_is_the_cheaper_rust_router_and_tokenizing():
    rows = [
        row("tandem lb", 1.9, 240),
        row("sglang-router", 2.0, 150),
        row("vllm-router", 4.0, 300),
        row("nginx", 1.1, 20),
    ]
    assert verdicts(rows, tokenizing_us=100) == [
        "result: router_added_p99 0.9 ms (goal 1) reached",
        "result: router_cpu_vs_rust_and_tokenizing 0.96 ratio (goal 1) reached",
        "result: router_added_p99_vs_rust 0.9 ratio (goal 1) reached",
    ]
    assert "short" in verdicts([row("tandem lb", 2.1, 240)], 100)[0]


def test_nothing_is_said_of_what_was_not_measured():
    assert verdicts([row("nginx", 2.0, 20)], 100) == []
    assert verdicts([row("tandem lb", None, 240)], 100) == []
    assert len(verdicts([row("tandem lb", 2.0, 240), row("sglang-router", None, 150)], 100)) == 2


@contextlib.asynccontextmanager
async def loading(make_connection, **settings):
    """Serve, and load the server from connections of this process; yield the load."""
    made = []

    def connection():
        made.append(make_connection())
        return made[-1]

    server = await asyncio.get_running_loop().create_server(connection, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    plan = Plan(port=port, path="/generate", duration_s=3600, warm_up_s=0, **settings)
    load = Load(plan)
    task = asyncio.create_task(load.run())
    try:
        yield load
    finally:
        task.cancel()
        await asyncio.wait([task])
        server.close()
        await until(lambda: all(each._transport.is_closing() for each in made))


async def until(condition) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - of counters, none with an event
            await asyncio.sleep(0.001)


async def test_the_client_counts_what_the_stub_answers_and_reads_its_streams():
    streams = Streams(num_events=3, interval_s=0.001)
    beats = asyncio.create_task(streams.run())
    stream_body = json.dumps({"text": "a", "stream": True})
    settings = {"body": '{"text": "a"}', "connections": 3, "num_streams": 2}
    async with loading(
        lambda: StubConnection({}, streams), stream_body=stream_body, **settings
    ) as load:
        await until(lambda: len(load.measured().latencies_ms) > 10)
        # More than one stream's worth on both: they begin again.
        await until(lambda: load.stream_bytes > 10 * 3 * len(EVENT))
        assert load.measured().num_failed == 0
    beats.cancel()


async def test_answers_that_are_not_good_are_counted_as_failed():
    class Broken(StubConnection):
        def _answer(self, _head, _body):
            self._transport.write(b"HTTP/1.1 503 No\r\nContent-Length: 0\r\n\r\n")

    async with loading(lambda: Broken({}), body="", connections=1, pause_s=0.001) as load:
        await until(lambda: load.measured().num_failed > 1)
        assert load.measured().latencies_ms == []
        assert load.measured().errors[0].startswith("HTTP/1.1 503")
