"""`tandem bench` as people run it, against the real frontend over a scripted backend."""

import asyncio
import json
import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from tandem.bench.report import LoadReport, Report
from tandem.frontend.app import create_app
from tandem.frontend.options import FrontendOptions, HttpOptions, TlsFiles
from tandem.frontend.server import listen, serving
from tandem.wire.errors import NoNodeAvailable
from tests.certificates import make_certificates
from tests.frontend.conftest import serve
from tests.frontend.fakes import FakeBackend, length, say

ROOT = Path(__file__).resolve().parents[3]
PROGRESS = re.compile(r"(\d+ streams?|trace): \d+/\d+ · ")


async def start(*argv: str, env: dict[str, str] | None = None) -> asyncio.subprocess.Process:
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    command = (sys.executable, "-P", "-m", "tandem", "bench", *argv)
    return await asyncio.create_subprocess_exec(
        *command, cwd=ROOT, env=os.environ | (env or {}), **pipes
    )


async def bench(client, tmp_path: Path, *argv: str) -> tuple[int, str, Report]:
    """Run it against a server; return its status, what it printed and its report."""
    out = tmp_path / "report.json"
    url = ("--url", str(client._base_url), "--output-file", str(out))
    process = await start(*url, "--input-len", "16", "--output-len", "8", *argv)
    printed, errors = await process.communicate()
    # A load that takes longer, by the machine, is told of every few seconds, and nothing else is.
    others = [line for line in errors.decode().splitlines() if not PROGRESS.match(line)]
    assert others == []
    return process.returncode, printed.decode(), msgspec.json.decode(out.read_bytes(), type=Report)


@pytest.fixture
def ids_backend() -> FakeBackend:
    return FakeBackend(None)


async def test_a_closed_loop_brings_every_token_of_every_request(ids_backend, tmp_path):
    async with serve(ids_backend) as client:
        status, printed, report = await bench(client, tmp_path, "--concurrency", "1", "3")
    assert status == 0
    assert [load.name for load in report.loads] == ["1 stream", "3 streams"]
    assert [(load.num_done, load.output_tokens) for load in report.loads] == [(8, 64), (24, 192)]
    assert [load.input_tokens for load in report.loads] == [128, 384]
    assert "24 of 24 requests" in printed
    prompts = Counter(tuple(request.prompt_ids) for request in ids_backend.requests)
    assert len(prompts) == 1 + 8 + 24  # with the warm-up, and none twice


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_openai_apis_are_driven_and_their_counts_believed(backend, tmp_path, api):
    async with serve(backend) as client:
        argv = ("--api", api, "--num-prompts", "4", "--warmup-requests", "0")
        _, _, report = await bench(client, tmp_path, "--concurrency", "2", *argv)
    [load] = report.loads
    assert (load.num_done, load.output_tokens) == (4, 32)
    assert load.input_tokens == sum(len(request.prompt_ids) for request in backend.requests)


async def test_a_trace_is_replayed_with_what_its_requests_share(ids_backend, tmp_path):
    trace = tmp_path / "trace.jsonl"
    rows = [{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}] * 2
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    async with serve(ids_backend) as client:
        argv = ("--trace", str(trace), "--warmup-requests", "0")
        _, _, report = await bench(client, tmp_path, *argv)
    first, second = (request.prompt_ids for request in ids_backend.requests)
    assert len(first) == 600
    assert first == second
    assert report.loads[0].output_tokens == 6


async def test_failures_are_told_by_kind_and_goodput_counts_them(ids_backend, tmp_path):
    answers = iter([[[1], length(2)], [NoNodeAvailable("no node is there")]])
    ids_backend.script = lambda _: next(answers)
    async with serve(ids_backend) as client:
        argv = ("--num-prompts", "2", "--concurrency", "1", "--warmup-requests", "0")
        status, printed, report = await bench(client, tmp_path, *argv, "--slo-ttft-ms", "1e6")
    assert status == 1
    assert report.loads[0].failures == {"short": 1, "HTTP 503": 1}
    assert report.loads[0].goodput_share == 0
    assert "failed, HTTP 503: 1, such as: no node is there" in printed
    assert "--disable-ignore-eos" in printed


async def stopped(backend: FakeBackend, tmp_path: Path, number: int) -> tuple[int, str, LoadReport]:
    """Stop a load of which some requests have ended and three never will."""
    hanging, num_asked = asyncio.Event(), 0

    def script(request):
        nonlocal num_asked
        num_asked += 1
        return (say(*[[1]] * 7, length(2)) if num_asked <= 2 else say([1], hanging))(request)

    backend.script = script
    out = tmp_path / "stopped.json"
    async with serve(backend) as client:
        argv = ("--url", str(client._base_url), "--output-file", str(out), "--concurrency", "3")
        process = await start(*argv, "--output-len", "8", "--warmup-requests", "0")
        await backend.until(lambda: backend.num_yielded == 16 + 3)
        process.send_signal(number)
        printed, _ = await process.communicate()
        await backend.until(lambda: len(backend.cancelled) == 3)
    (load,) = msgspec.json.decode(out.read_bytes(), type=Report).loads
    return process.returncode, printed.decode(), load


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_stopped_load_says_what_was_measured_and_gives_up_the_rest(
    ids_backend, tmp_path, number
):
    status, printed, load = await stopped(ids_backend, tmp_path, number)
    assert status == 130
    assert (load.num_done, load.num_unfinished, load.num_failed) == (2, 3, 0)
    assert load.is_stopped
    assert "stopped early; 3 requests were under way" in printed


@pytest.mark.parametrize(
    ("argv", "status", "told"),
    [
        (("--url", "http://127.0.0.1:1"), 1, "does not answer"),
        (("--url", "nowhere"), 2, "give a URL such as"),
        (("--trace", "/no/such/file"), 2, "No such file"),
    ],
)
async def test_what_cannot_be_is_refused_before_any_load(argv, status, told):
    process = await start(*argv)
    _, errors = await process.communicate()
    assert process.returncode == status
    assert told in errors.decode()


async def test_a_server_that_fails_the_warm_up_is_not_driven(ids_backend):
    ids_backend.script = say(NoNodeAvailable("no node is there"))
    async with serve(ids_backend) as client:
        process = await start("--url", str(client._base_url))
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert "failed the warm-up (HTTP 503): no node is there" in errors.decode()
    assert len(ids_backend.requests) == 1


async def test_a_certificate_that_is_not_trusted_is_told_with_what_to_do(ids_backend, tmp_path):
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
