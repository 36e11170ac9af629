"""`tandem batch` as people run it."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from tandem.__main__ import run
from tandem.batch.command import carry_out, parse
from tandem.wire.errors import ConfigInvalid
from tests.tandem.batch.stub import Stub, line, said

ROOT = Path(__file__).resolve().parents[3]


async def line_with(process: asyncio.subprocess.Process, words: bytes) -> bytes:
    """Return the first line with these words: on a slow machine one may tell first how far it is."""
    assert process.stderr is not None
    async for told in process.stderr:
        if words in told:
            return told
    raise AssertionError(f"it ended without {words!r}")


async def start(*argv: str, limit: str = "") -> asyncio.subprocess.Process:
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    command = [sys.executable, "-P", "-m", "tandem", "batch", *argv]
    if limit:
        command = ["bash", "-c", f'ulimit -f {limit}; exec "$@"', "bash", *command]
    return await asyncio.create_subprocess_exec(*command, cwd=ROOT, **pipes)


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
        status, told = await files.run(url, env={"OPENAI_API_KEY": "k1"})
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
    assert "150 requests: 150 succeeded, 0 failed; 150 of them now" in told
    assert set(stub.keys) == {"Bearer k1"}


async def test_failed_requests_are_in_the_output(files):
    def script(body):
        return {"bad": lambda: said("no", status=400), "cut": lambda: None}.get(
            body["prompt"], said
        )()

    files.write(line("good"), line("bad"), line("cut"), line("e", url="/v1/embeddings"))
    told_before = "2 succeeded, 2 failed (1 x HTTP 400, 1 x connection_broken)"
    async with Stub(script).serving() as url:
        status, told = await files.run(url, "--max-attempts", "1")
    assert status == 1
    assert told_before in told
    assert f"{told_before}; 0 of them now" in (await files.run(url))[1]
    by_name = {result["custom_id"]: result for result in files.results()}
    assert len(by_name) == 4
    assert by_name["bad"]["response"]["status_code"] == 400
    assert by_name["bad"]["response"]["body"] == {"error": {"message": "no"}}
    assert by_name["bad"]["error"] is None
    assert by_name["cut"]["response"] is None
    assert by_name["cut"]["error"]["code"] == "connection_broken"


@pytest.mark.parametrize(
    ("bad", "reason"), [("{\n", ""), (line("b", method="GET"), "method is 'GET': give POST")]
)
async def test_a_bad_line_is_reported_before_anything_is_sent(files, bad, reason):
    files.write(line("a"), bad, line("c"))
    status, told = await files.run("http://unused:1")
    assert status == 2
    assert f"in.jsonl, line 2: {reason}" in told
    assert not files.output.exists()


async def test_two_requests_of_one_name_are_refused_with_both_lines(files):
    files.write(line("a"), "\n", line("b"), line("a"))
    status, told = await files.run("http://unused:1")
    assert status == 2
    assert "lines 1 and 4 have the same custom_id 'a'" in told


async def test_ctrl_c_waits_for_what_is_under_way_and_the_same_command_goes_on(files):
    is_free, is_asked = asyncio.Event(), asyncio.Event()

    async def script(body):
        if int(body["prompt"]) >= 5 and not is_free.is_set():
            is_asked.set()
            await is_free.wait()
        return said(body["prompt"])

    files.write(*(line(str(number)) for number in range(40)))
    stub = Stub(script)
    async with stub.serving() as url:
        flags = ("--url", url, "--max-concurrency", "3")
        process = await start(str(files.input), "-o", str(files.output), *flags)
        await is_asked.wait()
        process.send_signal(signal.SIGINT)
        await line_with(process, b"answers under way")
        is_free.set()
        _, told = await process.communicate()
        assert process.returncode == 130
        assert b"give the same command again to go on" in told
        num_asked = len(stub.asked)
        assert len(files.results()) == num_asked
        assert 5 < num_asked < 40
        status, said_then = await files.run(url)
    assert status == 0
    assert f"resuming: {num_asked} of 40 are done" in said_then
    assert sorted(map(int, stub.prompts)) == list(range(40)), "nothing was asked twice"
    assert sorted(int(result["custom_id"]) for result in files.results()) == list(range(40))


async def test_a_second_ctrl_c_waits_for_nothing(files):
    stub = Stub(lambda body: asyncio.Event().wait())
    files.write(line("a"))
    async with stub.serving() as url:
        process = await start(str(files.input), "-o", str(files.output), "--url", url)
        await stub.is_asked.wait()
        for words in (b"answers under way", b"stopped"):
            process.send_signal(signal.SIGTERM)
            # Two that come before the first is seen would be one.
            await line_with(process, words)
        await process.communicate()
        assert process.returncode == 130


async def test_what_has_a_line_is_not_sent_again(files):
    files.write(line("a"), line("b"))
    stub = Stub(lambda body: said(status=200 if body["prompt"] == "a" else 401))
    async with stub.serving() as url:
        status, told = await files.run(url, "--max-concurrency", "1")
        assert (status, stub.prompts) == (2, ["a", "b"])
        assert "requires an API key" in told
        stub.script = lambda body: said()
        files.write(line("a"), line("c"))
        status, told = await files.run(url)
        assert (status, stub.prompts[2:]) == (0, ["c"])
        assert "resuming: 1 of 2 are done" in told
        assert (await files.run(url))[0] == 0
        assert len(stub.asked) == 3
    assert len(files.results()) == 2


@pytest.mark.parametrize("num_cut", [1, 2, 40, 10_000])
async def test_a_torn_last_line_is_cut_off_and_its_request_sent_again(files, num_cut):
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
async def test_a_file_that_is_no_output_stays_as_it_is(files, content):
    files.write(line("a"))
    files.output.write_text(content)
    status, told = await files.run("http://unused:1")
    assert status == 2
    assert "is no output of tandem batch" in told
    assert files.output.read_text() == content


async def test_one_output_has_one_writer(files):
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


async def test_a_full_disk_ends_it_with_what_to_do_and_loses_nothing(files):
    files.write(*(line(f"{number:04}") for number in range(60)))
    stub = Stub(lambda body: said("x" * 400 + body["prompt"]))
    async with stub.serving() as url:
        argv = (str(files.input), "-o", str(files.output), "--url", url)
        process = await start(*argv, limit="8")  # KiB: fewer than 20 results
        _, told = await process.communicate()
        assert process.returncode == 2
        assert b"File too large: results so far are kept" in told
        assert b"give the same command again" in told
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
        (["--max-concurrency", "0"], "--max-concurrency is 0: give at least 1"),
        (["-o", "IN"], "is the input"),
        (["--url", "nonsense"], "give a URL such as"),
        (["--extra-request-body", "[]"], "--extra-request-body"),
        (["--timeout-s", "inf"], "--timeout-s is inf: give at least 0.001"),
    ],
)
def test_flags_that_cannot_work_are_refused_before_anything_is_done(files, argv, said, capsys):
    files.write(line("a"))
    usual = [str(files.input), "-o", str(files.output)]
    argv = [str(files.input) if word == "IN" else word for word in argv]
    status, told = run(["batch", *usual, *argv]), capsys.readouterr().err
    assert status == 2
    assert said in told


async def test_an_input_that_can_be_read_only_once_is_refused(files):
    os.mkfifo(files.input)
    status, told = await files.run("http://unused:1")
    assert status == 2
    assert "can be read only once" in told
