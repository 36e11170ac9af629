"""`tandem batch`: files, signals, and the exit status."""

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest

from tandem.cli.main import run
from tandem.tools.batch.command import carry_out, parse
from tandem.wire.errors import ConfigInvalid
from tests.tools.batch.stub import Stub, line, said

ROOT = Path(__file__).resolve().parents[3]


async def start(*argv: str, limit: str = "") -> asyncio.subprocess.Process:
    command = [sys.executable, "-P", "-m", "tandem", "batch", *argv]
    if limit:
        command = ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "bash", *command]
    return await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=asyncio.subprocess.PIPE)


class Files:
    def __init__(self, folder: Path, capture: pytest.CaptureFixture) -> None:
        self._capture = capture
        self.input, self.output = folder / "in.jsonl", folder / "out.jsonl"

    def write(self, *lines: str) -> None:
        self.input.write_text("".join(lines))

    async def run(self, url: str, *argv: str, env=None) -> tuple[int, str]:
        """Run the command in this process; return its status and all that it said."""
        argv = [str(self.input), "-o", str(self.output), "--url", url, *argv]
        try:
            status = await carry_out(parse(argv, env or {}))
        except ConfigInvalid as error:
            return 2, error.for_operators
        return status, "".join(self._capture.readouterr())

    def results(self) -> list[dict]:
        return [json.loads(text) for text in self.output.read_text().splitlines()]


@pytest.fixture
def files(tmp_path, capsys) -> Files:
    return Files(tmp_path, capsys)


async def test_answers_have_the_shape_of_openai(files):
    files.write(*(line(f"r{number}") for number in range(150)))
    stub = Stub()
    async with stub.serving() as url:
        status, told = await files.run(f"{url}/v1/", env={"OPENAI_API_KEY": "k1"})
    assert status == 0, told
    results = {result["custom_id"]: result for result in files.results()}
    assert results.keys() == {f"r{number}" for number in range(150)}
    body = {
        "id": "cmpl-1",
        "choices": [{"index": 0, "text": "r7"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 2},
    }
    response = {"status_code": 200, "request_id": "cmpl-1", "body": body}
    assert len({result["id"] for result in results.values()}) == 150
    assert results["r7"].pop("id").startswith("batch_req_")
    assert results["r7"] == {"custom_id": "r7", "response": response, "error": None}
    assert "150 requests: 150 succeeded, 0 failed" in told
    assert set(stub.keys) == {"Bearer k1"}


async def test_lines_may_begin_with_a_byte_order_mark(files):
    files.write("\ufeff" + line("a"), line("b"), "\ufeff" + line("c"), "\ufeff\n")
    async with Stub().serving() as url:
        assert (await files.run(url))[0] == 0
    assert {result["custom_id"] for result in files.results()} == {"a", "b", "c"}


async def test_failed_requests_are_in_the_output(files):
    def script(body):
        return {"bad": lambda: said("no", status=400), "cut": lambda: None}.get(
            body["prompt"], said
        )()

    files.write(line("good"), line("bad"), line("cut"), line("e", url="/v1/embeddings"))
    summary = "4 requests: 2 succeeded, 2 failed (1 x HTTP 400, 1 x connection_broken)"
    async with Stub(script).serving() as url:
        for _ in range(2):
            status, told = await files.run(url)
            assert (status, summary in told) == (1, True)
    by_name = {result["custom_id"]: result for result in files.results()}
    assert len(files.results()) == len(by_name) == 4
    assert by_name["bad"]["response"]["status_code"] == 400
    assert by_name["bad"]["response"]["body"] == {"error": {"message": "no"}}
    assert by_name["bad"]["error"] is None
    assert by_name["cut"]["response"] is None
    assert by_name["cut"]["error"]["code"] == "connection_broken"


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{\n", ""),
        (line("b", method="GET"), "Invalid enum value 'GET'"),
        (line("b", body={"stream": True}), "stream is true: leave it out"),
        (line("b", body=5), "Expected `object`"),
        (line(""), "`str` of length >= 1"),
        (line("a"), "custom_id 'a' repeats"),
    ],
)
async def test_a_bad_line_is_reported_before_anything_is_sent(files, bad, reason):
    files.write(line("a"), bad, line("c"))
    status, told = await files.run("http://unused:1")
    assert status == 2
    assert "in.jsonl, line 2: " in told
    assert reason in told
    assert not files.output.exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
async def test_no_line_is_lost_or_doubled_by_a_signal(files, number):
    is_asked = asyncio.Event()

    async def script(body):
        if int(body["prompt"]) >= 30:
            is_asked.set()
            await asyncio.Event().wait()
        return said(body["prompt"])

    files.write(*(line(str(number)) for number in range(60)))
    stub = Stub(script)
    async with stub.serving() as url:
        flags = ("--url", url, "--max-concurrency", "5")
        process = await start(str(files.input), "-o", str(files.output), *flags)
        await is_asked.wait()
        process.send_signal(number)
        _, told = await process.communicate()
        if number == signal.SIGINT:
            assert (process.returncode, told) == (130, b"tandem batch: stopped\n")
        num_before = len(files.results())
        assert num_before > 20
        stub.script = lambda body: said(body["prompt"])
        status, told = await files.run(url)
    assert status == 0
    assert f"resuming: {num_before} of 60 are done" in told
    answers = {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in files.results()}
    assert answers == {str(number): str(number) for number in range(60)}
    assert len(files.results()) == 60


async def test_a_request_with_a_line_is_not_sent_again(files):
    files.write(line("a"), line("b"))
    stub = Stub(lambda body: said(status=200 if body["prompt"] == "a" else 401))
    async with stub.serving() as url:
        status, told = await files.run(url, "--max-concurrency", "1")
        assert (status, stub.prompts) == (2, ["a", "b"])
        assert "refuses the API key" in told
        stub.script = lambda body: said()
        files.write(line("a"), line("c"))
        status, told = await files.run(url)
        assert (status, stub.prompts[2:]) == (0, ["c"])
        assert "resuming: 1 of 2 are done" in told
        assert (await files.run(url))[0] == 0
        assert len(stub.asked) == 3
    assert len(files.results()) == 2


@pytest.mark.parametrize("num_cut", [1, 2, 40, 10_000])
async def test_a_torn_last_line_is_truncated_and_its_request_sent_again(files, num_cut):
    files.write(line("a"), line("b"))
    stub = Stub()
    async with stub.serving() as url:
        await files.run(url)
        whole = files.output.read_bytes()
        first, second = whole.splitlines(keepends=True)
        files.output.write_bytes(first + second[: max(1, len(second) - num_cut)])
        assert (await files.run(url))[0] == 0
    assert len(stub.asked) == 3
    assert files.output.read_bytes().startswith(first)
    assert sorted(result["custom_id"] for result in files.results()) == ["a", "b"]


@pytest.mark.parametrize("content", ["notes of mine", "notes\n", '{"id":"other"}\n'])
async def test_a_foreign_output_file_stays_unchanged(files, content):
    files.write(line("a"))
    files.output.write_text(content)
    status, told = await files.run("http://unused:1")
    assert status == 2
    assert "is not an output of tandem batch" in told
    assert files.output.read_text() == content


async def test_a_second_writer_of_the_output_is_refused(files):
    files.write(line("a"))
    again: list[tuple[int, str]] = []

    async def answer(body):
        if not again:
            again.append((0, ""))
            again.append(await files.run(url))
        return said()

    async with Stub(answer).serving() as url:
        assert (await files.run(url))[0] == 0
    assert again[1][0] == 2
    assert "in use" in again[1][1]
    assert [result["custom_id"] for result in files.results()] == ["a"]


async def test_a_full_disk_stops_the_job_without_losing_results(files):
    files.write(*(line(f"{number:04}") for number in range(60)))
    stub = Stub(lambda body: said("x" * 400 + body["prompt"]))
    async with stub.serving() as url:
        argv = (str(files.input), "-o", str(files.output), "--url", url)
        process = await start(*argv, limit="8")  # KiB: fewer than 20 results
        _, told = await process.communicate()
        assert process.returncode == 2
        assert b"File too large: results so far are kept" in told
        assert b"repeat the command to resume" in told
        num_kept = files.output.read_bytes().count(b"\n")
        assert 0 < num_kept < 20
        asked_before = set(stub.prompts)
        stub.asked.clear()
        assert (await files.run(url))[0] == 0
    assert len(stub.asked) == 60 - num_kept
    assert len(asked_before | set(stub.prompts)) == 60
    assert len(files.results()) == 60


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max-concurrency", "0"], "--max-concurrency is 0: use at least 1"),
        (["-o", "IN"], "is the input"),
        (["--url", "nonsense"], "is not a URL"),
        (["--timeout-s", "inf"], "--timeout-s is inf: use at least 0.001"),
    ],
)
def test_invalid_flags_are_refused(files, argv, said, capsys):
    files.write(line("a"))
    usual = [str(files.input), "-o", str(files.output)]
    argv = [str(files.input) if word == "IN" else word for word in argv]
    status, told = run(["batch", *usual, *argv]), capsys.readouterr().err
    assert status == 2
    assert said in told
