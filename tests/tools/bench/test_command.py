"""`tandem bench` as a process, against the real frontend over a scripted backend."""

import asyncio
import itertools
import os
import signal
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from tandem.frontend.app import create_app
from tandem.frontend.http.server import listen, serving
from tandem.frontend.options import FrontendOptions, HttpOptions, TlsFiles
from tandem.tools.bench.report import BenchReport
from tandem.wire.errors import NoNodeAvailable
from tests.certificates import make_certificates
from tests.frontend.conftest import serve
from tests.frontend.fakes import FakeBackend, length, say

ROOT = Path(__file__).resolve().parents[3]


async def start(*argv: str, env: dict[str, str] | None = None) -> asyncio.subprocess.Process:
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    command = (sys.executable, "-P", "-m", "tandem", "bench", *argv)
    return await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=os.environ | (env or {}), **pipes
    )


async def bench(client, tmp_path: Path, *argv: str) -> tuple[int, str, BenchReport]:
    """Run it against a server; return its status, what it printed and its report."""
    out = tmp_path / "report.json"
    url = ("--url", str(client._base_url), "--output-file", str(out))
    process = await start(*url, "--input-len", "16", "--output-len", "8", *argv)
    printed, errors = await process.communicate()
    assert errors == b""
    return (
        process.returncode,
        printed.decode(),
        msgspec.json.decode(out.read_bytes(), type=BenchReport),
    )


@pytest.fixture
def ids_backend() -> FakeBackend:
    return FakeBackend(None)


@pytest.mark.parametrize("num_processes", [1, 2])
async def test_every_token_of_every_request_is_counted(ids_backend, tmp_path, num_processes):
    async with serve(ids_backend) as client:
        argv = ("--max-concurrency", "3", "--processes", str(num_processes))
        status, printed, report = await bench(client, tmp_path, *argv)
    assert status == 0
    load = report.load
    assert (load.num_done, load.output_tokens, load.input_tokens) == (24, 192, 384)
    assert (load.ttft_ms.count, load.e2e_ms.count) == (24, 24)
    assert "3 streams: 24 of 24 requests" in printed
    prompts = Counter(tuple(request.prompt_ids) for request in ids_backend.requests)
    assert len(prompts) == 1 + 24  # the warm-up and the load; no prompt occurs twice


async def test_token_counts_of_completions_are_the_servers(backend, tmp_path):
    async with serve(backend) as client:
        argv = ("--api", "completions", "--num-prompts", "4", "--max-concurrency", "2")
        _, _, report = await bench(client, tmp_path, *argv)
    load = report.load
    assert (load.num_done, load.output_tokens) == (4, 32)
    assert load.input_tokens == sum(len(request.prompt_ids) for request in backend.requests[1:])


async def test_an_open_loop_sends_every_request(ids_backend, tmp_path):
    async with serve(ids_backend) as client:
        argv = ("--rate", "100", "--num-prompts", "3", "--processes", "2")
        _, _, report = await bench(client, tmp_path, *argv)
    assert (report.load.num_done, report.load.output_tokens) == (3, 24)


async def test_failures_are_reported_by_kind_and_reduce_goodput(ids_backend, tmp_path):
    whole, short = [list(range(8)), length(8)], [[1], length(2)]
    answers = iter([whole, short, [NoNodeAvailable("no node is there")]])
    ids_backend.script = lambda _: next(answers)
    async with serve(ids_backend) as client:
        argv = ("--num-prompts", "2", "--max-concurrency", "1", "--slo-ttft-ms", "1e6")
        status, printed, report = await bench(client, tmp_path, *argv)
    assert status == 1
    assert report.load.failures == {"short": 1, "HTTP 503": 1}
    assert report.load.goodput_share == 0
    assert "failed, HTTP 503: 1, such as: no node is there" in printed
    assert "use a smaller --output-len" in printed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_a_stopped_command_stops_the_load(ids_backend, number):
    hanging = asyncio.Event()
    answers = itertools.chain([[[1], length(1)]], itertools.repeat([[1], hanging]))
    ids_backend.script = lambda _: next(answers)
    async with serve(ids_backend) as client:
        argv = ("--url", str(client._base_url), "--output-len", "1", "--max-concurrency", "3")
        process = await start(*argv, "--processes", "2")
        await ids_backend.until(lambda: ids_backend.num_yielded >= 5)
        process.send_signal(number)
        _, errors = await process.communicate()
        await ids_backend.until(lambda: len(ids_backend.cancelled) == 3)
    if number == signal.SIGINT:
        assert (process.returncode, errors) == (130, b"tandem bench: stopped\n")


@pytest.mark.parametrize(
    ("argv", "status", "told"),
    [
        (("--url", "http://127.0.0.1:1"), 1, "cannot be reached"),
        (("--url", "nowhere"), 2, "is not a URL"),
        (("--output-file", "/no/such/file"), 2, "No such file"),
    ],
)
async def test_errors_end_the_command_before_any_load(argv, status, told):
    process = await start(*argv)
    _, errors = await process.communicate()
    assert process.returncode == status
    assert told in errors.decode()


async def test_a_failed_warm_up_ends_the_command(ids_backend):
    ids_backend.script = say(NoNodeAvailable("no node is there"))
    async with serve(ids_backend) as client:
        process = await start("--url", str(client._base_url))
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert "failed the warm-up (HTTP 503): no node is there" in errors.decode()
    assert len(ids_backend.requests) == 1


async def test_an_untrusted_certificate_is_reported_with_the_remedy(ids_backend, tmp_path):
    files = make_certificates(tmp_path)
    http = HttpOptions(tls=TlsFiles(files.cert, files.key))
    with listen("127.0.0.1", 0) as sock:
        app = create_app(ids_backend, FrontendOptions(http=http))
        async with serving(app, sock):
            url = ("--url", f"https://127.0.0.1:{sock.getsockname()[1]}", "--output-len", "4")
            process = await start(*url)
            _, said = await process.communicate()
            assert process.returncode == 1
            assert b"SSL_CERT_FILE" in said
            trusting = await start(*url, env={"SSL_CERT_FILE": files.ca})
            await trusting.communicate()
            assert trusting.returncode == 0
